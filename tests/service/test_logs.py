"""What the service says, and that it goes on where nobody listens."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

import grpc
import pytest

from tests.service.running import (
    NOT_SERVING,
    READINESS,
    SERVING,
    RunningService,
    client,
    is_alive,
    modelless,
    wait_until,
)
from tests.service.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("logs") / "tiny")


@pytest.fixture
def service(model):
    with modelless("--model", str(model), "--load-format", "dummy", "--num-blocks", "512") as service:
        service.wait_ready()
        yield service


def stuff(service: RunningService) -> None:
    """Nobody reads stderr from here on, and what may be written there is written."""
    service.is_read = False
    fcntl.fcntl(service.process.stderr, fcntl.F_SETPIPE_SZ, os.sysconf("SC_PAGE_SIZE"))
    fd = os.open(f"/proc/{service.children()['engine']}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    line = b"x" * 1023 + b"\n"
    refused = 0
    try:
        # The supervisor takes some of it out while it goes in.
        while refused < 100:
            try:
                os.write(fd, line)
            except BlockingIOError:
                refused += 1
                os.sched_yield()
    finally:
        os.close(fd)


def test_a_stderr_that_nobody_reads_stops_nothing(service):
    with client(service.wait_ready()[0]) as call:
        stuff(service)
        for _ in range(300):
            with pytest.raises(grpc.RpcError) as failure:
                call.generate("", max_tokens=1)
            assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert call.generate().usage.output_tokens == 4
        assert call.health("") == call.health(READINESS) == SERVING
        os.kill(service.children()["engine"], signal.SIGKILL)
        wait_until(lambda: call.health(READINESS) == NOT_SERVING, "the engine is missed")
        wait_until(lambda: call.health(READINESS) == SERVING, "there is a new one")
        assert call.generate().usage.output_tokens == 4
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait() == 0
    service.is_read = True


def test_in_json_every_line_is_an_object_with_its_time_and_a_failed_call_is_one(model):
    flags = ["--model", str(model), "--load-format", "dummy", "--num-blocks", "512", "--log-format", "json"]
    with modelless(*flags, "--log-requests") as service, client(service.wait_ready()[0]) as call:
        call.generate()
        with pytest.raises(grpc.RpcError):
            call.generate("", max_tokens=0)
        # Nothing of the log: a library's line, or a dying process's.
        fd = os.open(f"/proc/{service.children()['engine']}/fd/2", os.O_WRONLY)
        os.write(fd, b"Fatal: native\n")
        os.close(fd)
        assert service.end() == 0
    told = [json.loads(line) for line in service.lines]
    for line in told:
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
        assert {"level", "process"} <= line.keys()
    assert {line["process"] for line in told} >= {"supervisor", "front end 0"}
    of_calls = [line["reason"] for line in told if "code" in line]
    assert of_calls == ["", "INVALID_REQUEST"]
    assert any(line.get("message") == "Fatal: native" for line in told)


def test_a_drain_at_its_limit_says_nothing_that_is_no_news(model):
    """The engine, which is in the middle of a step when the last front end goes, has nobody to write to."""
    flags = ["--model", str(model), "--load-format", "dummy", "--num-blocks", "512", "--drain-timeout", "0.5"]
    with modelless(*flags) as service, client(service.wait_ready()[0]) as call:
        streams = [call.stream(max_tokens=4000) for _ in range(4)]
        for stream in streams:
            assert len(list(itertools.islice(stream, 10))) == 10
        engine, frontend = service.children()["engine"], service.children()["frontend"]
        os.kill(engine, signal.SIGSTOP)
        service.process.send_signal(signal.SIGTERM)
        for stream in streams:
            with pytest.raises(grpc.RpcError) as failure:
                list(stream)
            assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: not is_alive(frontend), "the front end has ended")
        os.kill(engine, signal.SIGCONT)
        assert service.process.wait() == 0
        service._reading.join()
    text = "\n".join(service.lines)
    assert "stopped" in text
    assert not any(word in text for word in ("WARNING", "ERROR", "Traceback", "Broken pipe")), text
