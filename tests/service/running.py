"""A whole service in processes of its own, as `serve` starts it, and a gRPC client's view of it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon_grpc.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
READINESS = "photon_grpc.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

#: The commands that start `photon-grpc`.
WITH_MODEL = (sys.executable, "-m", "photon_grpc")
WITHOUT_MODEL = (sys.executable, "-m", "tests.service.modelless")


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 240.0) -> None:
    """Poll; the limit, below that of pytest, only ends a test that would hang."""
    give_up_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError(what)
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Neither gone nor dead and waiting for a parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class RunningService:
    """The supervisor's process, its lines on stderr and its children."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.is_read = True
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            while not self.is_read:
                time.sleep(0.02)

    def ready_lines(self) -> list[str]:
        return [line for line in self.lines if "ready on " in line]

    def wait_ready(self, times: int = 1, limit_s: float = 240.0) -> list[str]:
        """Wait until the service has reported ready `times` times; return its addresses."""
        wait_until(lambda: len(self.ready_lines()) >= times or self.process.poll() is not None, "ready", limit_s)
        assert self.process.poll() is None, "\n".join(self.lines)
        match = re.search(r"ready on (.*?) · ", self.ready_lines()[-1])
        assert match
        return match[1].split(", ")

    def children(self) -> dict[str, int]:
        """`engine` (also a `mortal_engine`), `frontend` (with several, the last) -> process id."""
        found = {}
        for pid in self.pids():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            # Between fork and exec it has no words yet.
            if len(words) > 2:
                found[re.split("[._]", words[2].decode())[-1]] = pid
        return found

    def pids(self) -> list[int]:
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in task.read_text().split() if is_alive(int(pid))]

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        code = self.process.wait()
        self._reading.join()
        return code


@contextlib.contextmanager
def serving(*flags: str, program: tuple[str, ...] = WITH_MODEL) -> Iterator[RunningService]:
    """As `photon-grpc serve` on any free port, on a CPU."""
    listen = ["--listen", "127.0.0.1:0", "--device", "cpu"]
    with started([*program, "serve", *listen, *flags]) as service:
        yield service


@contextlib.contextmanager
def modelless(*flags: str) -> Iterator[RunningService]:
    """Serve by an engine that computes no model, for tests that need only its ids; --model gives their tokenizer."""
    with serving(*flags, program=WITHOUT_MODEL) as service:
        yield service


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[RunningService]:
    service = RunningService(command)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()


@contextlib.contextmanager
def client(address: str) -> Iterator[Client]:
    # A pool of its own: channels with equal options share a connection, and its back-off, otherwise.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
    with grpc.insecure_channel(address, options) as channel:
        yield Client(channel)


class Client:
    """The few calls that these tests make."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    def generate(self, text: str = "def", max_tokens: int = 4, **where: bool) -> inference_pb2.GenerateResponse:
        return self.inference.Generate(_request(text, max_tokens), timeout=60, **where)

    def stream(self, text: str = "def", max_tokens: int = 3000) -> Iterator[inference_pb2.StreamGenerateResponse]:
        return self.inference.StreamGenerate(_request(text, max_tokens), timeout=100)

    def health(self, service: str) -> int | None:
        """None where nobody answers."""
        try:
            return self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status
        except grpc.RpcError:
            return None


def _request(text: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text=text)
    request.sampling.temperature = 0
    request.stop.max_tokens = max_tokens
    return request
