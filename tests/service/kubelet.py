"""A kubelet's part in the life of one container: its probes, of which liveness ends where the pod is deleted; then the
preStop hook, SIGTERM, and SIGKILL where the grace period is over."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from tests.service.running import READINESS, SERVING, RunningService, client


class Kubelet:
    """Notes what happened, in order: `ready`, `unready`, `preStop`, `SIGTERM`, `exit 0`; `unhealthy` where the liveness
    probe failed."""

    def __init__(self, service: RunningService, period_s: float = 0.05, failure_threshold: int = 2) -> None:
        self.events: list[str] = []
        self._service = service
        self._period_s = period_s
        self._failure_threshold = failure_threshold
        self._is_deleted = threading.Event()
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def probing(self) -> Iterator[Kubelet]:
        """Probes, as gRPC health checks, to the end of the block."""
        address = self._service.wait_ready()[0]
        probes = [
            threading.Thread(target=self._probe, args=(address, READINESS, "ready", "unready", self._is_over)),
            threading.Thread(target=self._probe, args=(address, "", "", "unhealthy", self._is_deleted)),
        ]
        for probe in probes:
            probe.start()
        try:
            yield self
        finally:
            self._is_deleted.set()
            self._is_over.set()
            for probe in probes:
                probe.join()

    def delete(self, pre_stop: Callable[[], object], grace_s: float) -> int:
        """The end of a pod; returns the exit code. The grace period includes the hook."""
        began_s = time.monotonic()
        self._is_deleted.set()
        self.events.append("preStop")
        pre_stop()
        self.events.append("SIGTERM")
        self._service.process.send_signal(signal.SIGTERM)
        try:
            code = self._service.process.wait(began_s + grace_s - time.monotonic())
        except subprocess.TimeoutExpired:
            self.events.append("SIGKILL")
            self._service.process.kill()
            code = self._service.process.wait()
        self._is_over.set()
        self.events.append(f"exit {code}")
        return code

    def _probe(self, address: str, service: str, good: str, bad: str, is_over: threading.Event) -> None:
        num_failed, told = 0, ""
        with client(address) as call:
            while not is_over.is_set():
                is_good = call.health(service) == SERVING
                if is_over.is_set() or self._service.process.poll() is not None:
                    return
                num_failed = 0 if is_good else num_failed + 1
                now = good if is_good else bad
                if now != told and (is_good or num_failed >= self._failure_threshold):
                    told = now
                    self.events += [now] if now else []
                time.sleep(self._period_s)
