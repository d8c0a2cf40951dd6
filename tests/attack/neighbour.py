"""A well-behaved caller beside an attack, in a process of its own: one-token Generates and health checks, and how long
each took."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon_grpc.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
_READINESS = "photon_grpc.v1.InferenceService"
_PAUSE_S = 0.02
#: A call that waited so long counts as failed, with this time.
_PATIENCE_S = 60.0
#: It ends by itself, even if whoever started it is gone.
_MOST_S = 300.0


@dataclass
class Experience:
    """Seconds of every call, and how those that failed did. Filled when the attack is over."""

    generate_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def told(self) -> str:
        """`Generate p50 0.02 p99 0.31, health p99 0.05`."""
        parts = f"Generate p50 {quantile(self.generate_s, 0.5):.2f} p99 {quantile(self.generate_s, 0.99):.2f}"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{parts}, health p99 {quantile(self.health_s, 0.99):.2f}{failed}"


def quantile(values: list[float], share: float) -> float:
    """The element at ⌊n·share⌋ of the sorted list."""
    return sorted(values)[int(len(values) * share)] if values else 0.0


@contextlib.contextmanager
def neighbour(address: str) -> Iterator[Experience]:
    """Calls from here to the end of the block; the first call has ended when the block begins."""
    told = Experience()
    command = [sys.executable, "-m", "tests.attack.neighbour", address]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield told
        said, _ = process.communicate(timeout=2 * _PATIENCE_S)
        vars(told).update(json.loads(said))
    finally:
        process.kill()
        process.wait()


async def _call_until(
    over: asyncio.Event, call: Callable[[], Awaitable[object]], times: list[float], failed: list[str]
) -> None:
    while not over.is_set():
        started_s = time.monotonic()
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            failed.append(error.code().name)
        times.append(time.monotonic() - started_s)
        await asyncio.sleep(_PAUSE_S)


async def _main(address: str) -> None:
    over = asyncio.Event()
    _end_with_stdin(over)
    told = Experience()
    request = inference_pb2.GenerateRequest(text="def")
    request.stop.max_tokens = 1
    check = health_pb2.HealthCheckRequest(service=_READINESS)
    # Two connections: what holds up one call on a connection must not count for the other.
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, own) as first, grpc.aio.insecure_channel(address, own) as second:
        generate = inference_pb2_grpc.InferenceServiceStub(first).Generate
        health = health_pb2_grpc.HealthStub(second).Check
        await generate(request, timeout=_PATIENCE_S)
        print("begun", flush=True)
        async with asyncio.timeout(_MOST_S):
            await asyncio.gather(
                _call_until(over, lambda: generate(request, timeout=_PATIENCE_S), told.generate_s, told.failed),
                _call_until(over, lambda: health(check, timeout=_PATIENCE_S), told.health_s, told.failed),
            )
    print(json.dumps(vars(told)))


def _end_with_stdin(over: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
