"""However many calls fail, the log reports their kinds and numbers in a few lines."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from photon_grpc import errors
from photon_grpc.access.key_ring import KeyRing
from photon_grpc.compose.observation import observation
from photon_grpc.config.flags import ServerConfig
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.status import call_status
from photon_grpc.server.server import Server
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc, model_pb2, model_pb2_grpc
from tests.server.failing import failure
from tests.server.fake_frontend import ASK, GENERATE, FakeFrontend, raw, until
from tests.server.keys import ALL, bearer, write_keys

INTERVAL_S = 0.05
PROMPT = "my secret prompt"


@pytest.fixture
def failures() -> FailureLog:
    return FailureLog(INTERVAL_S)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="photon_grpc.observe")
    return caplog


def fail(failures: FailureLog, error: Exception, method: str = "/s/M") -> None:
    failures.report(error, call_status(error, "id"), method, 0.01)


def lines(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(message.splitlines()[0]) for message in log.messages]


async def test_a_few_failures_have_one_line_each_and_no_summary(failures, log):
    for _ in range(10):
        fail(failures, errors.QueueFull("full"))
    await asyncio.sleep(2 * INTERVAL_S)
    assert [line["event"] for line in lines(log)] == ["call failed"] * 10


async def test_many_failures_are_summed_up_by_kind_and_each_is_counted_once(failures, log):
    for _ in range(1000):
        fail(failures, errors.QueueFull("full"))
        fail(failures, errors.InvalidRequest("empty", field="text"), "/s/N")
    fail(failures, errors.Draining("draining"))
    assert len(lines(log)) == 21
    await asyncio.sleep(2 * INTERVAL_S)
    assert lines(log)[21:] == [
        {
            "event": "more calls failed",
            "method": method,
            "code": code,
            "reason": reason,
            "count": 990,
            "within_s": INTERVAL_S,
        }
        for method, code, reason in (
            ("/s/M", "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
            ("/s/N", "INVALID_ARGUMENT", "INVALID_REQUEST"),
        )
    ]


async def test_every_interval_starts_from_zero(failures, log):
    for _ in range(3):
        for _ in range(12):
            fail(failures, errors.QueueFull("full"))
        await asyncio.sleep(2 * INTERVAL_S)
    counts = [line.get("count", 1) for line in lines(log)]
    assert counts == [*[1] * 10, 2] * 3


async def test_the_traceback_of_an_unforeseen_exception_is_logged_twice_and_bounded(failures, log):
    def there(depth: int) -> None:
        back(depth - 1)

    def back(depth: int) -> None:
        if depth < 0:
            raise RuntimeError(PROMPT)
        there(depth)

    for _ in range(100):
        fail(failures, errors.QueueFull("full"))
        try:
            there(400)
        except RuntimeError as error:
            fail(failures, error)
    await asyncio.sleep(2 * INTERVAL_S)
    pages = [record.getMessage() for record in log.records if record.levelno == logging.ERROR]
    assert [page.count("\n") > 10 for page in pages] == [True, True, False]
    assert json.loads(pages[-1])["count"] == 98
    assert json.loads(pages[-1])["reason"] == "RuntimeError"
    for page in pages[:2]:
        assert page.count("\n") <= 60
        assert re.search(r"in back\n", page)
    assert PROMPT not in log.text


async def test_with_a_request_log_a_refused_request_has_no_line_here(log):
    failures = FailureLog(INTERVAL_S, has_requests=False)

    def report(error: Exception, **what: bool) -> None:
        failures.report(error, call_status(error, "id"), "/s/M", 0.01, **what)

    report(errors.QueueFull("full"), is_request=True)
    report(errors.InvalidRequest("no message"), is_request=False)
    report(errors.InternalFailure("ours"), is_request=True)
    report(RuntimeError(PROMPT), is_request=True)
    assert [line["reason"] for line in lines(log)] == ["INVALID_REQUEST", "INTERNAL_FAILURE", "INTERNAL_FAILURE"]


@pytest.mark.parametrize("metrics_listen", ["", "127.0.0.1:0"])
async def test_with_a_request_log_a_failed_call_that_is_no_request_still_has_a_line(
    log: pytest.LogCaptureFixture, tmp_path: Path, metrics_listen: str
) -> None:
    config = ServerConfig(metrics_listen=metrics_listen, log_requests=True)
    observed = observation(config)
    frontend, keys = FakeFrontend(), KeyRing(str(write_keys(tmp_path / "keys.toml")))
    server = Server(
        frontend,  # type: ignore[arg-type]
        config=config,
        rules=observed.rules("", ApiKeys(keys, ())),
    )
    server._inference.places.limit = 1
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    async with grpc.aio.insecure_channel(address) as channel:
        inference, models = inference_pb2_grpc.InferenceServiceStub(channel), model_pb2_grpc.ModelServiceStub(channel)
        key = bearer(ALL)
        await failure(inference.Generate(ASK))
        await failure(inference.Generate(ASK, metadata=bearer("wrong")))
        await failure(models.GetModel(model_pb2.GetModelRequest(model="nope"), metadata=key))
        await failure(models.Tokenize(model_pb2.TokenizeRequest(), metadata=key))
        await failure(raw(channel, GENERATE)(b"\xff\xff", metadata=key))
        frontend.refusals = [errors.QueueFull("full")]
        await failure(inference.Generate(ASK, metadata=key))
        idle = inference.MultiplexGenerate(metadata=key)
        await until(lambda: server._inference.places.size == 1)
        await idle.write(pb.MultiplexGenerateRequest())
        await idle.read()
        await idle.write(pb.MultiplexGenerateRequest(generate=pb.GenerateRequest()))
        await idle.read()
        other = inference.MultiplexGenerate(metadata=key)
        assert await idle.code() is grpc.StatusCode.UNAVAILABLE
        await other.done_writing()
        assert await other.code() is grpc.StatusCode.OK
    await server.drain_and_stop(0)
    assert [line["reason"] for line in lines(log)] == [
        "MISSING_CREDENTIALS",
        "INVALID_CREDENTIALS",
        "MODEL_NOT_FOUND",
        "INVALID_REQUEST",
        "MALFORMED_MESSAGE",
        "INVALID_REQUEST",
        "IDLE_STREAM_EVICTED",
    ]
    assert len(frontend.refused_requests) == 1
