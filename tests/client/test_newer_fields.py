"""A client and a server of two releases: neither drops silently what the other says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from photon_grpc import errors
from photon_grpc.admin.v1 import admin_pb2, admin_pb2_grpc
from photon_grpc.client import Client
from photon_grpc.client.admin import AdminClient
from photon_grpc.client.newer_fields import NewerFields, newer_field
from photon_grpc.client.options import build_request
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from photon_grpc.v1.annotations_pb2 import needs_refusal

from .fake_server import FakeServer, Refusal, error_info, message, serving

REFUSING = model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED
#: An assistant's turn with a field that older servers would ignore.
NEWER = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [{"name": "f", "arguments_json": "{}"}]},
]
PATH = "chat.messages[1].tool_calls"


class Release(FakeServer):
    """A server that counts how often its features are read, and answers multiplexed requests."""

    def __init__(self, *features: Any, refusals: int = 0) -> None:
        super().__init__()
        self.features = list(features)
        self.num_asked = 0
        self.num_refusals = refusals
        self.hangs = False

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        self.num_asked += 1
        if self.hangs:
            await asyncio.sleep(60)
        if self.num_refusals:
            self.num_refusals -= 1
            refusal = Refusal(grpc.StatusCode.PERMISSION_DENIED, "no scope", [error_info("SCOPE_REQUIRED")])
            await context.abort(refusal.code, refusal.message, refusal.all_trailers())
        return await super().GetModel(request, context)

    async def StreamGenerate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        async for step in super().StreamGenerate(request, context):
            sent = pb.StreamGenerateResponse()
            sent.CopyFrom(step)
            if not self.release:
                sent.start.release = ""
            yield sent

    async def MultiplexGenerate(self, actions: Any, context: Any) -> AsyncIterator[pb.MultiplexGenerateResponse]:
        handle = 0
        async for action in actions:
            handle += 1
            self.requests.append(action.generate)
            response = message("ok", start=True, finish=pb.FINISH_REASON_EOS)
            response.start.release = self.release
            item = pb.MultiplexItem(handle=handle, request_id=action.generate.request_id, response=response)
            yield pb.MultiplexGenerateResponse(items=[item])


async def by_generate(client: Client, prompt: Any, **options: Any) -> str:
    return (await client.generate(prompt, **options)).text


async def by_stream(client: Client, prompt: Any, **options: Any) -> str:
    return "".join([delta.text async for delta in client.stream(prompt, **options)])


async def by_multiplexed_generate(client: Client, prompt: Any, **options: Any) -> str:
    async with client.multiplex() as many:
        return (await many.generate(prompt, **options)).text


async def by_multiplexed_stream(client: Client, prompt: Any, **options: Any) -> str:
    async with client.multiplex() as many:
        return "".join([delta.text async for delta in many.stream(prompt, **options)])


WAYS = (by_generate, by_stream, by_multiplexed_generate, by_multiplexed_stream)


@pytest.mark.parametrize("way", WAYS)
async def test_an_older_server_does_not_get_a_field_that_it_would_ignore(way: Any) -> None:
    async with serving(Release(model_pb2.FEATURE_CHAT)) as fake, Client(fake.target) as client:
        for _ in range(2):
            with pytest.raises(errors.FeatureNotSupported, match=r"tool_calls and would ignore it") as caught:
                await way(client, NEWER)
            assert caught.value.field == PATH
        assert not fake.requests
        # What it knows goes there without a question.
        num_asked = fake.num_asked
        assert await way(client, "hi") == "ok"
        assert fake.num_asked == num_asked
        # Once it was upgraded, so does the rest.
        fake.features.append(REFUSING)
        assert await way(client, NEWER) == "ok"


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_that_refuses_unknown_fields_is_asked_once(way: Any) -> None:
    async with serving(Release(REFUSING)) as fake, Client(fake.target) as client:
        assert await way(client, "hi") == "ok"
        assert fake.num_asked == 0
        answers = await asyncio.gather(*[way(client, NEWER) for _ in range(5)])
        assert (answers, fake.num_asked) == (["ok"] * 5, 1)
        assert fake.requests[-1].chat.messages[1].tool_calls[0].name == "f"


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_of_an_older_replica_is_refused(way: Any) -> None:
    """One replica has named the feature for all, and another one gets the request."""
    async with serving(Release(REFUSING)) as fake, Client(fake.target) as client:
        fake.release = ""
        with pytest.raises(errors.FeatureNotSupported, match=r"tool_calls and would ignore it") as caught:
            await way(client, NEWER)
        assert caught.value.field == PATH and len(fake.requests) == 1
        assert await way(client, "hi") == "ok"
        fake.release = "0.1.0"
        assert (await way(client, NEWER), fake.num_asked) == ("ok", 2)


async def test_a_stream_does_not_continue_at_an_older_replica() -> None:
    heartbeat, older = pb.StreamGenerateResponse(sequence=1), message("b", start=True)
    older.start.release = ""
    lost = Refusal(grpc.StatusCode.UNAVAILABLE, "lost", [error_info("DRAINING")])
    fake = Release(REFUSING)
    fake.script = ([heartbeat, message("a", start=True), lost], [heartbeat, older, "hang"])
    async with serving(fake), Client(fake.target) as client:
        stream = client.stream(NEWER)  # type: ignore[arg-type]
        assert (await anext(stream)).text == "a"
        fake.ended.clear()
        with pytest.raises(errors.FeatureNotSupported):
            await anext(stream)
        assert len(fake.requests) == 2
        async with asyncio.timeout(10):
            await fake.ended.wait()


@pytest.mark.parametrize("way", WAYS)
async def test_the_timeout_of_a_request_bounds_its_check(way: Any) -> None:
    async with serving(Release(REFUSING)) as fake, Client(fake.target) as client:
        fake.hangs = True
        with pytest.raises(errors.DeadlinePassed, match=r"0.05 s have passed"):
            await way(client, NEWER, timeout=0.05)
        assert fake.num_asked == 1 and not fake.requests


async def test_a_request_gets_the_time_that_its_check_leaves() -> None:
    async def ask() -> model_pb2.GetModelResponse:
        await asyncio.sleep(0.001)
        return model_pb2.GetModelResponse(model=model_pb2.Model(features=[REFUSING]))

    newer_fields, request = NewerFields(ask, "there"), build_request(NEWER, {})
    assert 0 < await newer_fields.check(request, 30.0) < 30
    assert await newer_fields.check(request, 30.0) == 30
    async with serving(Release(REFUSING)) as fake, Client(fake.target) as client:
        for way in (by_multiplexed_generate, by_multiplexed_stream):
            await client.close()
            assert await way(client, NEWER, timeout=30.0) == "ok"
            assert fake.requests[-1].scheduling.timeout.ToNanoseconds() < 30e9
        assert fake.num_asked == 2


async def test_a_count_of_tokens_is_checked_too() -> None:
    async with serving(Release()) as fake, Client(fake.target) as client:
        with pytest.raises(errors.FeatureNotSupported) as caught:
            await client.tokenize(NEWER)  # type: ignore[arg-type]
        assert caught.value.field == PATH and not fake.requests


async def test_a_key_that_may_not_read_features_is_told_why_they_are_read() -> None:
    async with serving(Release(REFUSING, refusals=1)) as fake, Client(fake.target) as client:
        with pytest.raises(errors.ScopeRequired, match=r"tool_calls needs the server's features to be known: no"):
            await client.generate(NEWER)  # type: ignore[arg-type]
        assert await by_generate(client, NEWER) == "ok"


async def test_a_stream_that_is_left_before_the_answer_sends_nothing() -> None:
    async with serving(Release(REFUSING)) as fake, Client(fake.target) as client:
        stream = client.stream(NEWER)  # type: ignore[arg-type]
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await anext(stream)
        assert not fake.requests
        # One that is left later ends its call.
        stream = client.stream(NEWER)  # type: ignore[arg-type]
        assert (await anext(stream)).text == "ok"
        stream.cancel()


def marked(message: Descriptor, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the fields on the way to every field with the option."""
    for field in message.fields:
        if field.GetOptions().Extensions[needs_refusal]:
            yield (*path, field)
        elif field.message_type is not None:
            yield from marked(field.message_type, (*path, field))


def with_field(request: Message, way: tuple[Any, ...]) -> str:
    """Set the field, and return its path."""
    names, target = [], request
    for field in way:
        last = field is way[-1]
        if field.message_type is None:
            setattr(target, field.name, b"x" if field.type == field.TYPE_BYTES else "x")
        elif field.is_repeated:
            target = getattr(target, field.name).add()
        else:
            target = getattr(target, field.name)
            target.SetInParent()
        names.append(f"{field.name}[0]" if field.is_repeated and not last else field.name)
    return ".".join(names)


@pytest.mark.parametrize("kind", [pb.GenerateRequest, model_pb2.TokenizeRequest])
def test_every_field_with_the_option_is_found(kind: Any) -> None:
    ways = [*marked(kind.DESCRIPTOR)]
    assert {way[-1].name for way in ways} >= {"tools", "tool_calls", "parts"}
    for way in ways:
        request = kind()
        path = with_field(request, way)
        assert newer_field(request) == path
    assert newer_field(kind(text="hi")) == newer_field(kind(chat=pb.ChatInput(tools_json="[]"))) == ""


def with_unknown(message: Message) -> Message:
    """Add an unknown field to the message and to each message in it."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                with_unknown(each)
    message.MergeFromString(b"\xa0\x38\x01")
    return message


class Newer(Release):
    """A server whose messages have fields that the client does not know, everywhere."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        response = await super().Generate(request, context)
        with_unknown(response)
        return response

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        response = await super().GetModel(request, context)
        response.model.limits.max_logprobs = 20
        with_unknown(response)
        return response

    async def MultiplexGenerate(self, actions: Any, context: Any) -> AsyncIterator[pb.MultiplexGenerateResponse]:
        async for frame in super().MultiplexGenerate(actions, context):
            with_unknown(frame)
            yield frame


def rich(text: str) -> pb.StreamGenerateResponse:
    response = message(text, start=True, finish=99)
    response.deltas[0].scores.add(token_id=5, rank=1).candidates.add(token_id=6)
    response.deltas[0].tool_calls.add(name="f")
    response.deltas[0].finish.MergeFromString(b"\xa0\x38\x01")
    with_unknown(response)
    return response


async def test_fields_and_values_of_a_newer_server_are_no_errors() -> None:
    fake = Newer(REFUSING, 98)
    fake.script = ([rich("ok")],)
    fake.state = 99
    async with serving(fake), Client(fake.target) as client:
        for way in WAYS:
            assert await way(client, "hi") == "ok"
        result = await client.generate("hi")
        assert (result.finish.reason, result.outputs[0].tool_calls[0].name) == ("99", "f")
        model = await client.model()
        assert (model.state, model.features, model.limits["max_logprobs"]) == (
            "99",
            ("UNKNOWN_FIELDS_REFUSED", "98"),
            20,
        )


class NewerAdmin(admin_pb2_grpc.AdminServiceServicer):
    async def ListQuarantine(self, request: Any, context: Any) -> admin_pb2.ListQuarantineResponse:
        response = admin_pb2.ListQuarantineResponse(entries=[admin_pb2.QuarantineEntry(fingerprint="f")])
        with_unknown(response)
        return response

    async def GetServerInfo(self, request: Any, context: Any) -> None:
        details = [error_info("FEATURE_NOT_SUPPORTED", field="900")]
        refusal = Refusal(grpc.StatusCode.UNIMPLEMENTED, "field 900 is not known", details)
        await context.abort(refusal.code, refusal.message, refusal.all_trailers())


async def test_an_operators_client_reads_a_newer_replica_and_tells_what_an_older_one_refuses() -> None:
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(NewerAdmin(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AdminClient(f"127.0.0.1:{port}") as admin:
        assert [entry.fingerprint for entry in await admin.quarantine()] == ["f"]
        with pytest.raises(errors.FeatureNotSupported, match="field 900 is not known"):
            await admin.replica()
        with pytest.raises(errors.FeatureNotSupported, match="serves no AdminService"):
            await admin.clear_quarantine(None)
    await server.stop(None)
