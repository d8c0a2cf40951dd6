"""Replicas of a server that can be killed and restarted quickly.

Each is one process with gRPC server, front end, engine and model, forked from a process that has imported torch. Run as
a program, this file is that process: for each address in a line of stdin it forks a replica, and prints its process id
when it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from photon_grpc import demo

ROOT = Path(__file__).resolve().parents[2]


class Replica:
    """A replica with the smaller embedded model, always at the same address."""

    def __init__(self, address: str, parent: Process) -> None:
        self.address = address
        self._parent = parent
        self._pid = 0

    async def start(self) -> None:
        """Start the replica, and wait until it is ready."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(f"{self.address}\n".encode())
        self._pid = int(await self._parent.stdout.readline())

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def replicas(count: int) -> AsyncIterator[list[Replica]]:
    """Yield replicas that are ready."""
    from photon_grpc.cli.first_addresses import choose_address

    command = [sys.executable, "-m", "tests.clients.replicas"]
    parent = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    running = [Replica(choose_address("127.0.0.1:0"), parent) for _ in range(count)]
    try:
        for replica in running:
            await replica.start()
        yield running
    finally:
        # Replicas end with their parent.
        parent.kill()
        await parent.wait()


def target_of(running: list[Replica]) -> str:
    """Return one name for all addresses."""
    return "ipv4:" + ",".join(replica.address for replica in running)


def fork_for_each_line() -> None:
    from photon_grpc.compose import assemble  # noqa: F401  what takes long

    assert "grpc" not in sys.modules, "gRPC does not survive a fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            serve(line.strip())


def serve(address: str) -> None:
    """Serve until this process or its parent is killed."""
    from photon_grpc.compose.llm import LLM
    from photon_grpc.config.flags import ServerConfig
    from photon_grpc.server.server import Server

    llm = LLM(demo.DRAFT, device="cpu", max_num_seqs=8, num_blocks=1024)
    program = llm._program

    async def listen() -> Server:
        server = Server(program._frontend, config=ServerConfig())
        await server.start((address,), reuse_port=False)
        return server

    server = asyncio.run_coroutine_threadsafe(listen(), program._loop).result()  # noqa: F841  kept
    print(os.getpid(), flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        signal.sigtimedwait((), 0.1)
    os._exit(0)


if __name__ == "__main__":
    fork_for_each_line()
