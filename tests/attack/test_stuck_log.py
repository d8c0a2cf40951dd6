"""Nobody reads the log, or it cannot be written: calls and health checks are answered all the same."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from photon_grpc.v1 import inference_pb2
from tests.attack.answers import answers, raw_call, strangers, tally
from tests.attack.figures import Figures
from tests.attack.size import Size
from tests.attack.victim import FLAGS
from tests.service.running import READINESS, ROOT, SERVING, WITHOUT_MODEL, client, wait_until

GENERATE = "/photon_grpc.v1.InferenceService/Generate"
REFUSED = inference_pb2.GenerateRequest(text="def", request_id="x" * 1_000).SerializeToString()
_PIPE_BYTES = 4_096


@pytest.mark.parametrize(
    "stderr", ["a pipe that nobody reads", pytest.param("a full disk", marks=pytest.mark.long_attack)]
)
async def test_calls_are_answered_though_the_log_is_stuck(
    tmp_path: Path, size: Size, figures: Figures, stderr: str
) -> None:
    address = f"unix:{tmp_path}/s"
    with log_to(stderr) as log, silent_service(address, size.model, log):
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
            found = await answers(
                (lambda: raw_call(channel, GENERATE, [REFUSED], to_stream=False, timeout=5))
                for _ in range(size.refused)
            )
        begun_s = time.monotonic()
        with client(address) as call:
            assert call.health("") == call.health(READINESS) == SERVING
            assert call.generate().usage.output_tokens == 4
        took_s = time.monotonic() - begun_s
    figures.add(f"log: {stderr}", f"{size.refused:,} refused calls", tally(found), neighbour=f"{took_s:.2f} after")
    assert strangers(found) == []
    assert set(tally(found)) == {"INVALID_REQUEST"}


@contextlib.contextmanager
def log_to(kind: str) -> Iterator[int]:
    if kind == "a full disk":
        ends = [os.open("/dev/full", os.O_WRONLY)]
    else:
        ends = list(os.pipe())
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        yield ends[-1]
    finally:
        for end in ends:
            os.close(end)


@contextlib.contextmanager
def silent_service(address: str, model: str, stderr: int) -> Iterator[None]:
    """Asks the service itself whether it is ready: what it says cannot be read. Ends it by SIGTERM."""
    flags = ("--model", model, "--device", "cpu", "--listen", address, *FLAGS)
    process = subprocess.Popen([*WITHOUT_MODEL, "serve", *flags], cwd=ROOT, stderr=stderr)
    try:
        with client(address) as call:
            wait_until(lambda: call.health(READINESS) == SERVING, "ready")
        yield
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
