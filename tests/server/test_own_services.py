"""Calls of operators' own services at a server whose front end answers as scripted: asks, ends, what is sent when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2, status_pb2

from photon_grpc.config.flags import ServerConfig
from photon_grpc.config.service_files import ServiceFile
from photon_grpc.core.generation import Timing, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import PromptTooLong, QueueFull
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish, Update
from photon_grpc.server.server import Server
from photon_grpc.server.services.answering import OtherServices
from photon_grpc.server.services.prompt_form import PromptForm
from photon_grpc.server.services.service_set import ServedMethod, read_services
from photon_grpc.v1 import service_pb2
from tests.server.fake_frontend import FakeFrontend
from tests.server.ruled import ruled
from tests.server.test_reflection import BOTH, ask, files_of
from tests.server.test_services import triage


def two_methods(file: Any) -> None:
    file.service[0].method.add(
        name="List", server_streaming=True, input_type=".acme.v1.Ticket", output_type=".acme.v1.Verdict"
    )


def end(text: str, reason: FinishReason = FinishReason.EOS) -> Update:
    json = text.encode() if reason is FinishReason.EOS else b""
    return Update((OutputDelta(0, text, finish=OutputFinish(reason, message_json=json)),), Usage(3, 1, 3), Timing())


class Caller:
    def __init__(self, frontend: FakeFrontend, channel: grpc.aio.Channel, methods: tuple[ServedMethod, ...]) -> None:
        self.frontend = frontend
        self._channel = channel
        self.sort, self.list = methods[0], methods[-1]

    def call(self, **options: Any) -> Any:
        method = self.sort
        made = self._channel.unary_unary(method.path, _bytes, method.response_class.FromString)
        return made(method.request_class(body="leak", secret="confidential"), **options)

    def stream(self) -> Any:
        made = self._channel.unary_stream(self.list.path, _bytes, self.list.response_class.FromString)
        return made(self.list.request_class(body="leak"))


def _bytes(message: Any) -> bytes:
    return message.SerializeToString()


RULED = ruled(
    "message Question { string text = 1 [(buf.validate.field).string.min_len = 3]; }"
    "message Reply { repeated int32 n = 1 [(buf.validate.field).repeated.unique = true]; }"
)


@pytest.fixture
async def caller(request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    """A caller of the set that a test names, of Triage unless it does."""
    frontend = FakeFrontend()
    services = read_services([ServiceFile("t.binpb", getattr(request, "param", None) or triage(two_methods))])
    server = Server(
        frontend,  # type: ignore[arg-type]
        config=ServerConfig(),
        services=OtherServices(services, PromptForm(None)),
    )
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    async with grpc.aio.insecure_channel(address) as channel:
        yield Caller(frontend, channel, services.methods)
    await server.drain_and_stop(0)


async def test_the_answer_is_parsed_and_the_ask_has_prompt_grammar_and_a_deadline(caller: Caller) -> None:
    caller.frontend.script = [end('{"severity":3}')]
    before_s = time.monotonic()
    assert (await caller.call()).severity == 3
    (ask,) = caller.frontend.asks
    assert ask.constraint is caller.sort.constraint
    assert ask.input.text.startswith(caller.sort.shared_prompt)  # type: ignore[union-attr]
    assert '{"body": "leak"}' in ask.input.text and "confidential" not in ask.input.text  # type: ignore[union-attr]
    assert ask.origin.method == "acme.v1.Triage/Sort"
    assert ask.origin.deadline_s is not None and ask.origin.deadline_s - before_s == pytest.approx(120, abs=30)


def limited(file: Any) -> None:
    model = file.service[0].method[0].options.Extensions[service_pb2.model]
    model.max_tokens, model.temperature, model.seed = 7, 0.25, 11


@pytest.mark.parametrize("caller", [triage(limited)], indirect=True)
async def test_the_ask_has_the_sampling_and_the_most_tokens_of_the_options(caller: Caller) -> None:
    caller.frontend.script = [end("{}")]
    await caller.call()
    (ask,) = caller.frontend.asks
    assert (ask.sampling.temperature, ask.sampling.seed, ask.stop.max_tokens) == (0.25, 11, 7)


@pytest.mark.parametrize(("context", "max_tokens"), [(8191, None), (8192, 2048)])
async def test_an_answer_takes_what_the_prompt_leaves_of_a_short_context_only(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, context: int, max_tokens: int | None
) -> None:
    found = replace(caller.frontend.model(""), max_context_tokens=context)
    monkeypatch.setattr(caller.frontend, "model", lambda name: found)
    caller.frontend.script = [end("{}")]
    await caller.call()
    assert caller.frontend.asks[0].stop.max_tokens == max_tokens


async def test_a_callers_deadline_is_kept(caller: Caller) -> None:
    caller.frontend.script = [end("{}")]
    before_s = time.monotonic()
    await caller.call(timeout=1000)
    deadline_s = caller.frontend.asks[0].origin.deadline_s
    assert deadline_s is not None and deadline_s - before_s > 900


async def test_a_message_of_a_stream_is_sent_before_the_next_one_is_complete(caller: Caller) -> None:
    go_on = asyncio.Event()
    caller.frontend.script = [
        Update((OutputDelta(0, '{"severi'),)),
        Update((OutputDelta(0, 'ty":1}\n{"seve'),)),
        go_on.wait,
        end('rity":2}\n'),
    ]
    call = caller.stream()
    assert (await call.read()).severity == 1
    go_on.set()
    assert (await call.read()).severity == 2
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_may_have_no_message(caller: Caller) -> None:
    caller.frontend.script = [end("")]
    assert [each async for each in caller.stream()] == []


@pytest.mark.parametrize("reason", [FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH])
async def test_a_cut_stream_keeps_its_complete_messages(caller: Caller, reason: FinishReason) -> None:
    caller.frontend.script = [end('{"severity":1}\n{"sever', reason)]
    call = caller.stream()
    assert (await call.read()).severity == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason.name in str(caught.value.details())


@pytest.mark.parametrize(
    ("refusal", "code", "words"),
    [
        (QueueFull("full", retry_after_s=1.0), grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
        (PromptTooLong("9 tokens", needed=9, limit=8), grpc.StatusCode.INVALID_ARGUMENT, "largest field .* is body"),
    ],
)
async def test_refusals_are_those_of_generate(
    caller: Caller, refusal: Exception, code: grpc.StatusCode, words: str
) -> None:
    caller.frontend.refusals = [refusal]
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await caller.call()
    assert caught.value.code() is code


async def test_an_answer_that_does_not_parse_is_our_defect_and_is_not_quoted(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caller.frontend.script = [end('{"confidential":1}')]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.call()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "confidential" not in str(caught.value.details()) + caplog.text


async def test_a_malformed_request_is_refused(caller: Caller) -> None:
    made = caller._channel.unary_unary(caller.sort.path)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await made(b"\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def detailed(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Return the reason of an error and its first field."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])  # type: ignore[arg-type]
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    if len(status.details) > 1 and status.details[1].Unpack(bad):
        return info.reason, bad.field_violations[0].field
    return info.reason, info.metadata["field"]


@pytest.mark.parametrize("caller", [RULED], indirect=True)
async def test_a_request_that_breaks_its_rules_never_reaches_the_front_end(caller: Caller) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"text: .* \[string.min_len\]") as caught:
        await caller._channel.unary_unary(caller.sort.path)(b"")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detailed(caught.value) == ("INVALID_REQUEST", "text")
    assert not caller.frontend.asks


@pytest.mark.parametrize("caller", [RULED], indirect=True)
async def test_an_answer_that_breaks_a_rule_is_not_returned_and_has_its_usage(caller: Caller) -> None:
    caller.frontend.script = [end('{"n":[1,1]}')]
    request = caller.sort.request_class(text="long").SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError, match=r"rule of n: .*\[repeated.unique\]") as caught:
        await caller._channel.unary_unary(caller.sort.path)(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert detailed(caught.value) == ("ANSWER_INVALID", "n")
    assert "x-photon-usage-bin" in dict(caught.value.trailing_metadata())


@pytest.mark.parametrize("caller", [RULED], indirect=True)
async def test_a_stream_ends_at_the_first_message_that_breaks_a_rule(caller: Caller) -> None:
    caller.frontend.script = [end('{"n":[1]}\n{"n":[1,1]}\n{"n":[2]}\n')]
    call = caller._channel.unary_stream(caller.list.path, _bytes, caller.list.response_class.FromString)(
        caller.list.request_class(text="long")
    )
    assert (await call.read()).n == [1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert detailed(caught.value) == ("ANSWER_INVALID", "n")


def with_anothers_status() -> bytes:
    """Return a set with a file of the name and the symbols of one of ours."""
    file = descriptor_pb2.FileDescriptorProto(name="google/rpc/status.proto", package="google.rpc", syntax="proto3")
    file.message_type.add(name="Status").field.add(name="theirs", number=9, type=9, label=1)
    found = descriptor_pb2.FileDescriptorSet.FromString(triage())
    found.file.insert(0, file)
    found.file[1].dependency.append(file.name)
    return found.SerializeToString()


@pytest.mark.parametrize("caller", [with_anothers_status()], indirect=True)
async def test_reflection_describes_each_service_by_its_own_files(caller: Caller) -> None:
    async def fields(symbol: str) -> list[str]:
        response = await ask(caller._channel, BOTH[0], file_containing_symbol=symbol)
        return [field.name for field in files_of(response)["google/rpc/status.proto"].message_type[0].field]

    assert await fields("acme.v1.Triage") == ["theirs"]
    assert await fields("photon_grpc.v1.InferenceService") == ["code", "message", "details"]
