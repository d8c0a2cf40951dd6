"""A real service in processes of its own, and the machine it runs on, for the benchmarks that go through gRPC."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def serving(*flags: str, ready_s: float = 300.0) -> Iterator[str]:
    """Starts `photon-grpc serve` with these flags and yields its address when it is ready. Raises RuntimeError when it does not get there."""
    address = free_address()
    command = [sys.executable, "-m", "photon_grpc", "serve", "--listen", address, "--log-level", "warning", *flags]
    process = subprocess.Popen(command)
    try:
        _wait_until_ready(address, process, ready_s)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(address: str, process: subprocess.Popen[bytes], ready_s: float) -> None:
    request = health_pb2.HealthCheckRequest(service="photon_grpc.v1.InferenceService")
    deadline_s = time.monotonic() + ready_s
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise RuntimeError(f"the service ended with exit code {process.returncode}")
            with contextlib.suppress(grpc.RpcError):
                if stub.Check(request, timeout=1.0).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.05)
    raise RuntimeError(f"the service was not ready within {ready_s} s")


def machine() -> str:
    """One line that says what a figure was measured on."""
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()
