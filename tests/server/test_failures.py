"""A failing call as seen by its client: one status with details, the request id in the trailers, no message before."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from photon_grpc import errors
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.calls.guard import CallRules, Guard
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.server.failing import failure, info_of, trailer
from tests.server.fake_frontend import ASK, GENERATE, HELLO, STREAM_GENERATE, FakeFrontend, raw
from tests.server.test_status import TABLE

Stub = inference_pb2_grpc.InferenceServiceStub

#: Field 3 (text) that is not UTF-8; a truncated tag; a length beyond the end; an endless group; field 0.
MALFORMED = [b"\x1a\x02\xff\xfe", b"\x08", b"\x1a\xff\xff\xff\x7fabc", b"\x0b", b"\x02\x01", b"\xff" * 20]


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
@pytest.mark.parametrize(("cls", "code", "reason"), TABLE, ids=[row[2] for row in TABLE])
async def test_every_refusal_arrives_with_its_details(
    inference: Stub,
    frontend: FakeFrontend,
    method: str,
    cls: type[errors.PhotonError],
    code: grpc.StatusCode,
    reason: str,
) -> None:
    frontend.refusals = [cls("not this time", field="a.b", needed=3, limit=2, retry_after_s=0.5)]
    call = getattr(inference, method)(pb.GenerateRequest(text="hi", request_id="mine"))
    error = await failure(call)
    assert (error.code(), error.details()) == (code, "not this time")
    assert (info_of(error).reason, info_of(error).domain) == (reason, "photon-grpc")
    assert dict(info_of(error).metadata) == {"field": "a.b", "needed": "3", "limit": "2"}
    # Clients reopen an evicted stream themselves; gRPC must not.
    assert trailer(error, "grpc-retry-pushback-ms") == ("-1" if cls is errors.IdleStreamEvicted else "500")
    assert trailer(error, "x-request-id") == "mine"
    assert "x-request-id" not in dict(await call.initial_metadata())


async def test_a_failure_after_output_began_keeps_what_was_sent(inference: Stub, frontend: FakeFrontend) -> None:
    frontend.script = [HELLO[0], errors.EngineFailure("the engine was lost", retry_after_s=1.0)]
    call = inference.StreamGenerate(ASK)
    assert (await call.read()).deltas[0].text == "hel"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), info_of(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILURE")
    assert frontend.streams[0].closed.is_set()


@pytest.mark.parametrize("message", MALFORMED)
@pytest.mark.parametrize(
    ("method", "is_stream"),
    [
        (GENERATE, False),
        (STREAM_GENERATE, True),
        ("/photon_grpc.v1.ModelService/Tokenize", False),
        ("/grpc.health.v1.Health/Watch", True),
    ],
)
async def test_malformed_bytes_are_refused_as_a_message(
    channel: grpc.aio.Channel, frontend: FakeFrontend, method: str, is_stream: bool, message: bytes
) -> None:
    if "Health" in method and message == MALFORMED[0]:
        message = b"\x0a\x02\xff\xfe"
    if "Tokenize" in method and message == MALFORMED[0]:
        message = b"\x12\x02\xff\xfe"
    error = await failure(raw(channel, method, stream=is_stream)(message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(error).reason == "MALFORMED_MESSAGE"
    assert trailer(error, "x-request-id")
    assert frontend.asks == []


async def test_malformed_bytes_on_a_request_stream(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(
        iter([b"\x1a\x02\xff\xfe"])
    )
    error = await failure(call)
    assert (error.code(), info_of(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
@pytest.mark.parametrize("started", [False, True])
async def test_an_unforeseen_exception_reveals_nothing(
    inference: Stub, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture, method: str, started: bool
) -> None:
    caplog.set_level(logging.DEBUG, logger="photon_grpc")
    frontend.script = [*HELLO[: int(started)], RuntimeError("my secret prompt")]
    error = await failure(getattr(inference, method)(pb.GenerateRequest(text="my secret prompt", request_id="r-1")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "r-1" in error.details()
    assert info_of(error).reason == "INTERNAL_FAILURE"
    assert "secret" not in str(error)
    text = caplog.text
    assert "r-1" in text
    assert "RuntimeError" in text
    assert "fake_frontend.py" in text
    assert "secret" not in text


async def test_a_failed_call_is_logged_as_one_line_of_json(
    inference: Stub, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="photon_grpc")
    frontend.refusals = [errors.InvalidRequest("my secret prompt is empty", field="text")]
    await failure(inference.Generate(pb.GenerateRequest(text="my secret prompt", request_id='a"b')))
    (record,) = [record for record in caplog.records if record.name.startswith("photon_grpc.observe")]
    line = json.loads(record.getMessage())
    assert line.pop("duration_ms") >= 0
    assert line == {
        "event": "call failed",
        "method": GENERATE,
        "code": "INVALID_ARGUMENT",
        "reason": "INVALID_REQUEST",
        "request_id": 'a"b',
        "field": "text",
    }


async def test_a_refusal_after_the_end_of_the_call_does_not_crash() -> None:
    """gRPC logs a stack for every exception except cancellation, so clients with short deadlines could fill the log."""

    class Over:
        async def read(self) -> bytes:
            return b""

        def time_remaining(self) -> None:
            return None

        def peer(self) -> str:
            return "unix:"

        def code(self) -> None:
            return None

        async def abort(self, *status: object) -> NoReturn:
            raise grpc.aio.InternalError("Failed execute_batch")

    async def refuse(request: object, context: object) -> NoReturn:
        raise errors.DeadlinePassed("the deadline has passed")

    async def continuation(details: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(refuse)

    handler = await Guard(CallRules(FailureLog())).intercept_service(
        continuation, SimpleNamespace(method="/s/m", invocation_metadata=())
    )
    with pytest.raises(asyncio.CancelledError):
        await handler.stream_unary(None, Over())


async def test_the_server_keeps_serving(inference: Stub, frontend: FakeFrontend, channel: grpc.aio.Channel) -> None:
    for message in MALFORMED:
        await failure(raw(channel, GENERATE)(message))
    frontend.refusals = [RuntimeError("x"), errors.QueueFull("full")]
    await failure(inference.Generate(ASK))
    await failure(inference.Generate(ASK))
    assert (await inference.Generate(ASK)).outputs[0].text == "hello!"


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
async def test_a_request_refused_while_it_is_read_fails_under_its_own_id(inference: Stub, method: str) -> None:
    request = pb.GenerateRequest(text="hi", request_id="mine")
    request.scheduling.timeout.seconds = -1
    error = await failure(getattr(inference, method)(request, metadata=(("x-request-id", "theirs"),)))
    assert (info_of(error).metadata["field"], trailer(error, "x-request-id")) == ("scheduling.timeout", "mine")


@pytest.mark.parametrize("request_id", ["x" * 129, "é", "a\nb", "\u200b"])
async def test_a_bad_request_id_is_named(inference: Stub, request_id: str) -> None:
    error = await failure(inference.Generate(pb.GenerateRequest(text="hi", request_id=request_id)))
    assert (error.code(), info_of(error).metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")
    # The call still has an id by which to find it.
    assert trailer(error, "x-request-id") not in (None, request_id)


async def test_a_bad_header_id_is_named(inference: Stub) -> None:
    error = await failure(inference.StreamGenerate(ASK, metadata=(("x-request-id", "y" * 129),)))
    facts = {"field": "x-request-id", "needed": "129", "limit": "128"}
    assert (error.code(), dict(info_of(error).metadata)) == (grpc.StatusCode.INVALID_ARGUMENT, facts)


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    error = await failure(raw(channel, "/photon_grpc.v1.InferenceService/Nothing")(b""))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
