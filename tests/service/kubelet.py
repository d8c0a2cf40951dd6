"""A kubelet's handling of one container: probes, the preStop hook, SIGTERM, and SIGKILL after the grace period.

The liveness probe stops when the pod is deleted.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


@dataclass(frozen=True)
class Probe:
    succeeds: Callable[[], bool]
    period_s: float = 0.05
    failure_threshold: int = 2


def grpc_serves(address: str, service: str = "", timeout_s: float = 20.0) -> bool:
    """Send a gRPC probe over a new connection."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status
        except grpc.RpcError:
            return False
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


class Kubelet:
    """A container with a log of its events and their times.

    Events: `started`, `ready`, `unready`, `unhealthy` (the liveness probe failed), `preStop`, `SIGTERM`, `exit 0`, and
    `SIGKILL` at the end of the grace period.
    """

    def __init__(self, process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
        self.events: list[tuple[float, str]] = []
        self._process = process
        self._is_deleted = threading.Event()
        self._is_over = threading.Event()

    @property
    def told(self) -> list[str]:
        return [what for _, what in self.events]

    def until_started(self, probe: Probe) -> None:
        """Run the startup probe. Raise TimeoutError if it fails, after which a kubelet would restart the container."""
        for _ in range(probe.failure_threshold):
            if probe.succeeds():
                return self._note("started")
            if self._process.poll() is not None:
                raise TimeoutError(f"ended with {self._process.returncode} before it was started")
            time.sleep(probe.period_s)
        raise TimeoutError("the startup probe failed too often")

    @contextlib.contextmanager
    def probing(self, readiness: Probe, liveness: Probe) -> Iterator[None]:
        """To the end of the block, each at its own period."""
        probes = [
            threading.Thread(target=self._watch, args=(readiness, "ready", "unready", self._is_over)),
            threading.Thread(target=self._watch, args=(liveness, "", "unhealthy", self._is_deleted)),
        ]
        for probe in probes:
            probe.start()
        try:
            yield
        finally:
            self._is_deleted.set()
            self._is_over.set()
            for probe in probes:
                probe.join()

    def delete(self, pre_stop: Callable[[], object], grace_s: float) -> int:
        """End the pod; return the exit code. The grace period includes the hook."""
        began_s = time.monotonic()
        self._is_deleted.set()
        self._note("preStop")
        pre_stop()
        self._note("SIGTERM")
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(began_s + grace_s - time.monotonic())
        except subprocess.TimeoutExpired:
            self._note("SIGKILL")
            self._process.kill()
            code = self._process.wait()
        self._is_over.set()
        self._note(f"exit {code}")
        return code

    def _watch(self, probe: Probe, good: str, bad: str, is_over: threading.Event) -> None:
        num_failed, told = 0, ""
        while not is_over.is_set():
            is_good = probe.succeeds()
            if is_over.is_set() or self._process.poll() is not None:
                return
            num_failed = 0 if is_good else num_failed + 1
            now = good if is_good else bad
            if now != told and (is_good or num_failed >= probe.failure_threshold):
                told = now
                if now:
                    self._note(now)
            is_over.wait(probe.period_s)

    def _note(self, what: str) -> None:
        self.events.append((time.monotonic(), what))
