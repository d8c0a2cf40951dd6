"""A real service in processes of its own, for the benchmarks that go through gRPC."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import workloads
from photon_grpc.config.settings import settings
from photon_grpc.v1 import model_pb2, model_pb2_grpc

_READINESS = health_pb2.HealthCheckRequest(service="photon_grpc.v1.InferenceService")
_STOP_S = 60.0


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def serving(*flags: str, ready_s: float = 300.0, program: str = "photon_grpc") -> Iterator[str]:
    """Starts `photon-grpc serve`, or the `program` in its place, with these flags and yields its address when it is
    ready. Raises RuntimeError when it does not get there."""
    address = free_address()
    process = start(address, "--log-level", "warning", *flags, program=program)
    try:
        wait_until_ready(address, process, ready_s)
        yield address
    finally:
        stop(process)


def start(
    address: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    stderr: int | None = None,
    program: str = "photon_grpc",
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", program, "serve", "--listen", address, *flags]
    # A drain that nobody waits for would only cost time.
    command += ["--drain-timeout", "5"]
    # Only flags decide what is measured.
    ours = {setting.variable for setting in settings()}
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.Popen(command, env=inherited | dict(environment or {}), stderr=stderr, text=True)


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_ready(address: str, process: subprocess.Popen[str], ready_s: float, poll_s: float = 0.02) -> None:
    """Raises RuntimeError when the process has ended, or is not ready after so long."""
    deadline_s = time.monotonic() + ready_s
    with grpc.insecure_channel(address, _channel_options()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise RuntimeError(f"the service ended with exit code {process.returncode}")
            with contextlib.suppress(grpc.RpcError):
                if stub.Check(_READINESS, timeout=1.0).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(poll_s)
    raise RuntimeError(f"the service was not ready within {ready_s} s")


def frontend_cpu_s(address: str) -> float:
    """CPU seconds of all front ends of the service that listens there; 0 where it is none of this machine (Linux)."""
    return _cpu_s(address, "frontend")


def engine_cpu_s(address: str) -> float:
    """The same of its engine."""
    return _cpu_s(address, "engine")


def _cpu_s(address: str, role: str) -> float:
    ticks = 0
    for name, pid in processes(address).items():
        if name.startswith(role):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def processes(address: str) -> dict[str, int]:
    """Those of the service that listens there, below its supervisor: "engine", "frontend 0", its "encoder 0", ... ->
    process id. Empty where it is none of this machine (Linux)."""
    commands: dict[int, list[str]] = {}
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            commands[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")

    def children(module: str, parents: Iterable[int]) -> list[int]:
        return [
            pid
            for pid, command in commands.items()
            if command[2:3] == [f"photon_grpc.service.processes.{module}"] and int(command[3]) in parents
        ]

    supervisors = [pid for pid, command in commands.items() if "serve" in command and address in command]
    frontends = children("frontend", supervisors)
    # A fork at its work has the encoder's command line, and another parent than it names.
    encoders = [pid for pid in children("encoder", frontends) if _parent(pid) in frontends]
    return (
        dict(zip(("engine",), children("engine", supervisors), strict=False))
        | {f"frontend {number}": pid for number, pid in enumerate(frontends)}
        | {f"encoder {number}": pid for number, pid in enumerate(encoders)}
    )


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def vocab_size(address: str) -> int:
    with grpc.insecure_channel(address, _channel_options()) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        return int(stub.GetModel(model_pb2.GetModelRequest(), timeout=30.0).model.vocab_size)


def _channel_options() -> list[tuple[str, int]]:
    # A proxy named in the environment is meant for other machines; a server that is starting is to be found at once.
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 100),
    ]


@contextlib.contextmanager
def model_flags(shape: str) -> Iterator[list[str]]:
    """Flags of `serve` for a shape with random weights and a tokenizer of random words; none for the embedded model,
    "demo"."""
    if shape == "demo":
        yield []
        return
    with tempfile.TemporaryDirectory() as directory:
        model = workloads.write_model_dir(shape, Path(directory))
        write_tokenizer(model, min(workloads.SHAPES[shape]["vocab_size"], workloads.VOCAB_SIZE))
        yield ["--model", str(model), "--load-format", "dummy"]


def write_tokenizer(directory: Path, vocab_size: int = 128256) -> None:
    """256 bytes, random words of 2-7 letters, 256 specials; no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    draw = random.Random(7)
    words: dict[str, None] = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < vocab_size - 256:
        words["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 7)))] = None
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|special_{number}|>", special=True) for number in range(256)])
    tokenizer.save(str(directory / "tokenizer.json"))
