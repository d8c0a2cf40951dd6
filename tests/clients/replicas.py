"""Replicas of the service on ports of their own, to be killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from photon_grpc import demo
from photon_grpc.cli.first_run import choose_address
from photon_grpc.client import Client

_READY_S = 110


class Replica:
    """`photon-grpc serve` with the smaller embedded model, always at the same address."""

    def __init__(self, address: str, log: Path) -> None:
        self.address = address
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Return when it is ready."""
        flags = ["--model", str(demo.DRAFT), "--device", "cpu", "--max-num-seqs", "8", "--num-blocks", "1024"]
        command = [sys.executable, "-m", "photon_grpc", "serve", "--listen", self.address, *flags]
        with self._log.open("a") as out:
            self._process = subprocess.Popen(command, stderr=out)  # noqa: ASYNC220
        async with Client(self.address) as client:
            await client.wait_until_ready(_READY_S)

    async def kill(self) -> None:
        """Return when nothing listens any more."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        host, _, port = self.address.rpartition(":")
        while True:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    probe.bind((host, int(port)))
                    return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def replicas(count: int, log: Path) -> AsyncIterator[list[Replica]]:
    """All of them ready."""
    running = [Replica(choose_address("127.0.0.1:0"), log) for _ in range(count)]
    try:
        await asyncio.gather(*(replica.start() for replica in running))
        yield running
    finally:
        for replica in running:
            await replica.kill()


def target_of(running: list[Replica]) -> str:
    """One name for all of them."""
    return "ipv4:" + ",".join(replica.address for replica in running)
