"""A request that ends the engine's process: it is found among those that were computed with it, and refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from tests.service.running import Client, RunningService, client, started
from tests.service.test_processes import reason_of
from tests.service.tiny import write_tiny_model

_LAUNCH = (
    "import asyncio, sys\n"
    "from photon_grpc.config.resolve import resolve\n"
    "from photon_grpc.service.logs.log_pipe import log_to_stderr\n"
    "from photon_grpc.service.supervisor import Supervisor\n"
    "given = dict(model=sys.argv[1], load_format='dummy', device='cpu', listen=['127.0.0.1:0'], num_blocks=512)\n"
    "config = resolve(given, {}).config\n"
    "log_to_stderr('info')\n"
    "service = Supervisor(config, engine=sys.argv[2])\n"
    "sys.exit(asyncio.run(service.run()))\n"
)
_OF_A_MODEL = "tests.service.stand_ins.mortal_engine"
_MODELLESS = "tests.service.modelless.mortal_engine"
_POISON = "zzz"
_HUGE = "yyy"
_INNOCENT = ("def", "class", "import")


@pytest.fixture
def service(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningService]:
    """With the engine that the test names."""
    model = write_tiny_model(tmp_path / "tiny")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for name, prompt in (("MORTAL_TO", _POISON), ("OUT_OF_MEMORY_BY", _HUGE)):
        monkeypatch.setenv(name, " ".join(map(str, tokenizer.encode(prompt).ids)))
    with started([sys.executable, "-c", _LAUNCH, str(model), request.param]) as service:
        service.wait_ready()
        yield service


def failure_of(call: Client, text: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as failure:
        call.generate(text)
    return failure.value.code(), reason_of(failure.value)


def check_engine_dies_of(call: Client, text: str, *, beside: Iterable[str]) -> None:
    """And those that compute beside it fail with the engine: what has sent nothing may be sent again, at once."""
    streams = [call.stream(each) for each in beside]
    for stream in streams:
        next(stream)
    assert failure_of(call, text) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTARTING")
    for stream in streams:
        with pytest.raises(grpc.RpcError) as failure:
            list(stream)
        assert reason_of(failure.value) == "ENGINE_FAILURE"


def verb(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "photon_grpc", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def told(service: RunningService, text: str) -> int:
    return sum(text in line for line in service.lines)


@pytest.mark.parametrize("service", [_OF_A_MODEL], indirect=True)
def test_a_request_that_the_device_has_no_memory_for_fails_alone(service: RunningService) -> None:
    engine = service.children()["engine"]
    with client(service.wait_ready()[0]) as call:
        expected = {text: call.generate(text, 8).outputs[0].text for text in _INNOCENT}
        check_engine_dies_of(call, _HUGE, beside=_INNOCENT)
        # As their clients try them again.
        beside = [call.stream(text) for text in _INNOCENT]
        assert failure_of(call, _HUGE)[0] is grpc.StatusCode.INTERNAL
        for stream in beside:
            assert next(stream)
            stream.cancel()
        assert {text: call.generate(text, 8).outputs[0].text for text in _INNOCENT} == expected
    assert service.children()["engine"] == engine


@pytest.mark.parametrize("service", [_MODELLESS, pytest.param(_OF_A_MODEL, marks=pytest.mark.full)], indirect=True)
def test_a_poison_costs_two_engines_and_those_beside_it_nothing_for_good(service: RunningService) -> None:
    with client(service.wait_ready()[0]) as call:
        expected = {text: call.generate(text, 8).outputs[0].text for text in _INNOCENT}
        for death in (1, 2):
            # As their clients try them again.
            check_engine_dies_of(call, _POISON, beside=_INNOCENT)
            service.wait_ready(death + 1)
        for _ in range(3):
            assert failure_of(call, _POISON) == (grpc.StatusCode.INTERNAL, "REQUEST_QUARANTINED")
        assert {text: call.generate(text, 8).outputs[0].text for text in _INNOCENT} == expected
        assert told(service, "the engine was killed by SIGABRT") == 2
        os.kill(service.children()["engine"], signal.SIGKILL)
        service.wait_ready(4)
        # Quarantine outlives engines, and a signal from outside accuses nobody.
        assert failure_of(call, _POISON) == (grpc.StatusCode.INTERNAL, "REQUEST_QUARANTINED")
        assert told(service, "computes alone once") == 1
        # Until an operator clears it: then it is computed again.
        (admin,) = [line.split()[-1] for line in service.lines if "admin service on unix:" in line]
        (entry,) = [line for line in verb("quarantine", "--target", admin) if " quarantined " in line]
        own, _, crashes, *_, request_id = entry.split()
        assert crashes == "2" and request_id != "-"
        assert verb("quarantine", "--target", admin, "--clear", own) == [f"cleared {own}"]
        assert own not in "".join(verb("quarantine", "--target", admin))
        assert failure_of(call, _POISON) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTARTING")
