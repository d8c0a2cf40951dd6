"""MultiplexGenerate over a real socket: requests share a stream and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2, status_pb2

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.client.channel import open_channel
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.frames import Add, Down, Failed
from photon_grpc.core.quotas import Quotas
from photon_grpc.errors import KVCapacity, ModelLoading
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.quotas import FrontendQuotas
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server import inference, multiplex
from photon_grpc.server.calls import methods
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import CallRules
from photon_grpc.server.multiplex import MultiplexCall
from photon_grpc.server.server import Server
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.fake_engine import FACTS, FakeLink, done, frontend, served
from tests.server.failing import failure, info_of
from tests.server.fake_frontend import serving, until
from tests.server.keys import bearer, block, write_keys

Code = grpc.StatusCode
TOKEN = 70
MiB = 2**20


class HeldEncoder(ThreadEncoder):
    """An encoder that holds the texts in `held` until a test releases them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_begin = asyncio.Event()
        self.held = {"held"}
        self.num_waiting = 0

    async def encode(self, input: Any, *args: Any) -> tuple[int, ...]:
        if getattr(input, "text", None) in self.held:
            self.num_waiting += 1
            try:
                await self.may_begin.wait()
            finally:
                self.num_waiting -= 1
        return await super().encode(input, *args)


class RoomyLink(FakeLink):
    """A link whose engine accepts all; with `answers` every request ends in the loop's next turn, with one token."""

    def __init__(self) -> None:
        super().__init__(msgspec.structs.replace(FACTS, **ROOMY))
        self.answers = False

    def send(self, frame: Down) -> None:
        super().send(frame)
        if self.answers and isinstance(frame, Add):
            finished = (done(frame.handle, num_generated=1),)
            asyncio.get_running_loop().call_soon(lambda: self.step((frame.handle, TOKEN), finished=finished))


ROOMY = {"max_model_len": 2**20, "num_blocks": 2**20, "max_queue_size": 4096, "max_queued_tokens": 2**23}


class Service:
    """A server with a real front end and an engine that a test scripts."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        model = served(max_context_tokens=2**20)
        self.link = RoomyLink()
        self.encoder = HeldEncoder(model, pool)
        self.frontend = Frontend(link=self.link, model=model, encoder=self.encoder)
        self.server = Server(self.frontend, config=ServerConfig())
        self.calls: list[MultiplexCall] = []
        self.stub: inference_pb2_grpc.InferenceServiceStub
        self.channel: grpc.aio.Channel
        self.address = ""

    async def is_at_rest(self) -> None:
        await until(lambda: not self.frontend.num_streams and not self.encoder.num_waiting)
        assert not self.frontend._streams._running


class Caller:
    """One multiplexed stream, and the items received on it so far."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub, **options: Any) -> None:
        self.call = stub.MultiplexGenerate(**options)
        self.frames: list[pb.MultiplexGenerateResponse] = []
        self._reading: asyncio.Task[None] | None = None

    def read(self) -> Caller:
        self._reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for frame in self.call:
                self.frames.append(frame)

    @property
    def items(self) -> list[pb.MultiplexItem]:
        return [item for frame in self.frames for item in frame.items]

    async def generate(self, request_id: str, text: str = "hi", **fields: Any) -> None:
        request = pb.GenerateRequest(request_id=request_id, text=text, **fields)
        await self.call.write(pb.MultiplexGenerateRequest(generate=request))

    async def cancel(self, request_id: str) -> None:
        action = pb.MultiplexGenerateRequest.Cancel(request_id=request_id)
        await self.call.write(pb.MultiplexGenerateRequest(cancel=action))

    def errors(self) -> list[tuple[str, str]]:
        """Return (id, reason) of every error, in order."""
        return [(item.request_id, reason(item.error)) for item in self.items if item.HasField("error")]

    def handle(self, request_id: str) -> int:
        return next(item.handle for item in self.items if item.request_id == request_id)

    def text(self, request_id: str) -> str:
        handle = self.handle(request_id)
        return "".join(delta.text for item in self.items if item.handle == handle for delta in item.response.deltas)

    def num_finished(self) -> int:
        return sum(item.response.HasField("timing") for item in self.items)


def info(error: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    found = error_details_pb2.ErrorInfo()
    assert error.details[0].Unpack(found)
    return found


def reason(error: status_pb2.Status) -> str:
    return info(error).reason


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    with ThreadPoolExecutor(1) as pool:
        service = Service(pool)

        def remembered(*args: Any) -> MultiplexCall:
            service.calls.append(MultiplexCall(*args))
            return service.calls[-1]

        monkeypatch.setattr(inference, "MultiplexCall", remembered)
        (service.address,) = await service.server.start(("127.0.0.1:0",), reuse_port=False)
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(service.address, options) as service.channel:
            service.stub = inference_pb2_grpc.InferenceServiceStub(service.channel)
            yield service
        service.encoder.may_begin.set()
        await service.server.drain_and_stop(0)
        await service.is_at_rest()


async def running(service: Service, *ids: str, **options: Any) -> Caller:
    """Return a caller whose requests the engine has, in this order, with handles 1, 2, 3, ..."""
    caller = Caller(service.stub, **options).read()
    for number, request_id in enumerate(ids, len(service.link.adds) + 1):
        await caller.generate(request_id)
        await service.link.added(number)
    return caller


# --- items of a stream -----------------------------------------------------------------------------------------------


async def test_one_step_is_one_frame_for_all(service: Service) -> None:
    caller = await running(service, "a", "b", "c")
    service.link.step((1, TOKEN), (2, TOKEN), (3, TOKEN))
    await until(lambda: len(caller.frames) == 1)
    service.link.step((1, TOKEN), (3, TOKEN), finished=(done(1), done(3)))
    await until(lambda: len(caller.frames) == 2)
    assert [(item.handle, item.request_id) for item in caller.frames[0].items] == [(1, "a"), (2, "b"), (3, "c")]
    assert [(item.handle, item.request_id) for item in caller.frames[1].items] == [(1, ""), (3, "")]
    assert [item.response.start.request_id for item in caller.frames[0].items] == ["a", "b", "c"]
    for item in caller.frames[1].items:
        assert (item.response.sequence, item.response.usage.output_tokens) == (2, 2)
        assert item.response.HasField("timing") and item.response.deltas[0].HasField("finish")


async def test_what_gathers_while_a_message_is_written_is_one_frame(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writing = asyncio.Event(), asyncio.Event()
    write = service.server._writer.write

    async def slow(context: Any, message: Any) -> None:
        writing.set()
        await gate.wait()
        await write(context, message)

    monkeypatch.setattr(service.server._writer, "write", slow)
    caller = await running(service, "a", "b")
    service.link.step((1, TOKEN), (2, TOKEN))
    await writing.wait()
    for _ in range(100):
        service.link.step((1, TOKEN), (2, TOKEN))
    service.link.step((1, TOKEN), finished=(done(1),))
    gate.set()
    await until(lambda: len(caller.frames) == 2)
    letter = caller.frames[0].items[0].response.deltas[0].text
    assert letter and [len(item.response.deltas[0].text) for item in caller.frames[1].items] == [101, 100]
    assert caller.text("a") == letter * 102
    assert [item.response.HasField("usage") for item in caller.frames[1].items] == [True, False]


async def test_a_large_heap_is_written_in_frames_of_bounded_size(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplex, "MAX_FRAME_BYTES", 200)
    ids = [f"r{number}" for number in range(30)]
    caller = await running(service, *ids)
    service.link.step(*[(number, TOKEN) for number in range(1, 31)], finished=tuple(map(done, range(1, 31))))
    await until(lambda: caller.num_finished() == 30)
    assert max(frame.ByteSize() for frame in caller.frames) < 500
    assert [item.request_id for item in caller.items] == ids


async def test_half_closing_lets_running_requests_finish(service: Service) -> None:
    caller = await running(service, "a", "b")
    await caller.call.done_writing()
    service.link.step((1, TOKEN), finished=(done(1),))
    await until(lambda: caller.num_finished() == 1)
    assert not caller.call.done()
    service.link.step((2, TOKEN), finished=(done(2),))
    assert await caller.call.code() is Code.OK
    assert caller.num_finished() == 2


async def test_a_stream_without_requests_is_ok(service: Service) -> None:
    caller = Caller(service.stub).read()
    await caller.call.done_writing()
    assert await caller.call.code() is Code.OK
    assert caller.frames == []


async def test_the_calls_id_comes_with_the_first_frame(service: Service) -> None:
    caller = await running(service, "a", metadata=(("x-request-id", "call"),))
    service.link.step((1, TOKEN))
    assert dict(await caller.call.initial_metadata())["x-request-id"] == "call"
    assert service.link.adds[0].request.request_id == "a"
    caller.call.cancel()


async def test_an_interval_holds_tokens_of_its_request_only(service: Service) -> None:
    caller = Caller(service.stub).read()
    options = pb.StreamOptions()
    options.min_interval.FromSeconds(3600)
    await caller.generate("slow", stream=options)
    await service.link.added(1)
    await caller.generate("fast")
    await service.link.added(2)
    for count in range(1, 5):
        service.link.step((1, TOKEN), (2, TOKEN))
        await until(lambda count=count: len(caller.frames) == count)
    assert [len(frame.items) for frame in caller.frames] == [2, 1, 1, 1]
    service.link.step((1, TOKEN), finished=(done(1),))
    await until(lambda: caller.num_finished() == 1)
    assert len(caller.text("slow")) == len(caller.text("fast")) + 1
    caller.call.cancel()


async def test_many_requests_while_their_reader_sleeps_are_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more actions are read than may have unsent updates; nothing is lost."""
    monkeypatch.setattr(multiplex, "MAX_UNSENT", 32)
    service.link.answers = True
    gate = asyncio.Event()
    write = service.server._writer.write

    async def held(context: Any, message: Any) -> None:
        await gate.wait()
        await write(context, message)

    monkeypatch.setattr(service.server._writer, "write", held)
    caller = Caller(service.stub).read()

    async def send() -> None:
        for number in range(300):
            await caller.generate(f"r{number}", text="" if number % 2 else "hi")
        await caller.call.done_writing()

    sending = asyncio.create_task(send())
    await until(lambda: len(service.calls[0]._ready) >= 32 if service.calls else False)
    await asyncio.sleep(0.05)
    assert len(service.calls[0]._ready) + len(service.calls[0]._members) < 32 + 64
    gate.set()
    await sending
    assert await caller.call.code() is Code.OK
    await until(lambda: caller.num_finished() == 150)
    assert Counter(caller.errors()) == {(f"r{number}", "INVALID_REQUEST"): 1 for number in range(1, 300, 2)}
    assert len({item.handle for item in caller.items}) == 300


async def test_thousands_of_requests_of_one_stream_leave_nothing(service: Service) -> None:
    service.link.answers = True

    async def actions(count: int) -> AsyncIterator[pb.MultiplexGenerateRequest]:
        for number in range(count):
            # Most are refused at once, since real requests take a millisecond.
            request_id = "" if number % 10 else f"r{number}"
            yield pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(request_id=request_id, text="hi"))

    caller = Caller(service.stub, request_iterator=actions(2000)).read()
    assert await caller.call.code() is Code.OK
    await until(lambda: caller.num_finished() == 200)
    assert len(caller.errors()) == 1800
    assert not service.calls[0]._members and not service.calls[0]._ready


async def test_actions_are_read_while_frames_are_written(service: Service) -> None:
    """A stream that writes in every turn of the loop still reads."""
    caller = await running(service, "loud")
    speaking = True

    async def speak() -> None:
        while speaking:
            service.link.step((1, TOKEN))
            await asyncio.sleep(0)

    task = asyncio.create_task(speak())
    await caller.generate("late")
    await asyncio.wait_for(service.link.added(2), 120)
    await caller.cancel("loud")
    await until(lambda: bool(caller.errors()))
    speaking = False
    await task
    assert caller.errors() == [("loud", "CANCELLED")]
    caller.call.cancel()


# --- cancel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["preparing", "queued", "running"])
async def test_cancelling_by_id_ends_that_request_alone(service: Service, phase: str) -> None:
    caller = await running(service, "other")
    await caller.generate("mine", text="held" if phase == "preparing" else "hi")
    if phase == "preparing":
        await until(lambda: service.encoder.num_waiting == 1)
    else:
        await service.link.added(2)
    if phase == "running":
        service.link.step((1, TOKEN), (2, TOKEN))
        await until(lambda: len(caller.items) == 2)
    await caller.cancel("mine")
    await until(lambda: bool(caller.errors()))
    error = caller.items[-1]
    assert (error.request_id, error.error.code, reason(error.error)) == ("mine", Code.CANCELLED.value[0], "CANCELLED")
    assert error.handle == 2
    await until(lambda: service.link.aborted == ([] if phase == "preparing" else [2]))
    assert service.encoder.num_waiting == 0
    service.link.step((1, TOKEN), (2, TOKEN), finished=(done(1), done(2)))
    await caller.call.done_writing()
    assert await caller.call.code() is Code.OK
    assert [item.handle for item in caller.items if item.response.HasField("timing")] == [1]
    assert caller.errors() == [("mine", "CANCELLED")]


@pytest.mark.parametrize("request_id", ["", "nobody", "finished", "refused", "cancelled"])
async def test_cancelling_an_unknown_id_is_ignored(service: Service, request_id: str) -> None:
    caller = await running(service, "finished", "cancelled")
    await caller.generate("refused", text="")
    service.link.step((1, TOKEN), finished=(done(1),))
    await caller.cancel("cancelled")
    await until(lambda: caller.num_finished() == 1 and len(caller.errors()) == 2)
    await caller.cancel(request_id)
    await caller.call.done_writing()
    assert await caller.call.code() is Code.OK
    assert len(caller.items) == 3


async def test_an_id_may_be_used_again_after_its_end_with_another_handle(service: Service) -> None:
    caller = await running(service, "a")
    service.link.step((1, TOKEN), finished=(done(1),))
    await until(lambda: caller.num_finished() == 1)
    await caller.generate("a")
    await service.link.added(2)
    await caller.cancel("a")
    await caller.generate("a")
    await service.link.added(3)
    service.link.step((3, TOKEN), finished=(done(3),))
    await until(lambda: caller.num_finished() == 2)
    assert [item.handle for item in caller.items] == [1, 2, 3]
    caller.call.cancel()


# --- failures of one request -----------------------------------------------------------------------------------------


BAD = {
    "no action": (b"", "", "INVALID_REQUEST", "action"),
    "no id": (pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(text="x")), "", "INVALID_REQUEST", "request_id"),
    "long id": (
        pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(text="x", request_id="i" * 129)),
        "i" * 128,
        "INVALID_REQUEST",
        "request_id",
    ),
    "no prompt": (
        pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(request_id="bad")),
        "bad",
        "INVALID_REQUEST",
        "input",
    ),
    "no such model": (
        pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(request_id="bad", text="x", model="none")),
        "bad",
        "MODEL_NOT_FOUND",
        "model",
    ),
    "no descriptors": (
        pb.MultiplexGenerateRequest(
            generate=pb.GenerateRequest(
                request_id="bad",
                text="x",
                structured_output=pb.StructuredOutput(protobuf=pb.StructuredOutput.Protobuf()),
            )
        ),
        "bad",
        "INVALID_REQUEST",
        "structured_output.protobuf.file_descriptor_set",
    ),
    "no message": (b"\xff\xff\xff", "", "MALFORMED_MESSAGE", None),
    "no UTF-8": (b"\x0a\x08\x0a\x03bad\x1a\x01\xff", "bad", "MALFORMED_MESSAGE", None),
    "long and no message": (b"\x0a\xff\xff\x7f\x0a\x03bad" + b"\xff" * 20_000, "bad", "MALFORMED_MESSAGE", None),
    "an id in use": (
        pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(request_id="good", text="x")),
        "good",
        "DUPLICATE_REQUEST_ID",
        "request_id",
    ),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_item_ends_neither_the_stream_nor_a_neighbour(service: Service, kind: str) -> None:
    bad, request_id, expected, field = BAD[kind]
    caller = Caller(service.stub)
    caller.call = service.channel.stream_stream(
        methods.MULTIPLEX,
        request_serializer=lambda action: action if isinstance(action, bytes) else action.SerializeToString(),
        response_deserializer=pb.MultiplexGenerateResponse.FromString,
    )()
    caller.read()
    await caller.generate("good")
    await service.link.added(1)
    await caller.call.write(bad)
    await until(lambda: bool(caller.errors()))
    assert caller.errors() == [(request_id, expected)]
    item = caller.items[-1]
    assert (item.handle, info(item.error).metadata.get("field")) == (2, field)
    service.link.step((1, TOKEN), finished=(done(1),))
    await caller.call.done_writing()
    assert await caller.call.code() is Code.OK
    assert caller.num_finished() == 1


async def test_a_too_long_id_is_shortened_in_errors_and_logs(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer, the failure log and the record hold the same cut id; a request in flight with that id continues."""
    records: list[str] = []
    monkeypatch.setattr(service.frontend, "refused", lambda origin, error: records.append(origin.request_id))
    caplog.set_level(logging.INFO, "photon_grpc.observe")
    cut_id = "i" * 128
    caller = await running(service, cut_id)
    await caller.generate("i" * 300_000)
    await until(lambda: bool(caller.errors()))
    assert caller.errors() == [(cut_id, "INVALID_REQUEST")] and caller.items[-1].ByteSize() < 1024
    assert [json.loads(line)["request_id"] for line in caplog.messages] == records == [cut_id]
    service.link.step((1, TOKEN), finished=(done(1),))
    await until(lambda: caller.num_finished() == 1)
    caller.call.cancel()


async def test_failures_from_the_engine_reach_their_own_item(service: Service) -> None:
    caller = await running(service, "a", "b")
    service.link.step((1, TOKEN), failed=(Failed.of(2, KVCapacity("too many blocks", needed=9, limit=6)),))
    await until(lambda: bool(caller.errors()))
    error = next(item.error for item in caller.items if item.HasField("error"))
    assert (error.code, error.message) == (Code.FAILED_PRECONDITION.value[0], "too many blocks")
    assert (info(error).metadata["needed"], info(error).metadata["limit"]) == ("9", "6")
    service.link.step((1, TOKEN), finished=(done(1),))
    await until(lambda: caller.num_finished() == 1)
    caller.call.cancel()


async def test_a_lost_engine_fails_every_item(service: Service) -> None:
    caller = await running(service, "begun", "queued")
    service.link.step((1, TOKEN))
    await until(lambda: len(caller.items) == 1)
    facts = service.link.facts
    service.link.lose()
    await until(lambda: len(caller.errors()) == 2)
    await caller.generate("meanwhile")
    await until(lambda: len(caller.errors()) == 3)
    expected = {("begun", "ENGINE_FAILURE"), ("queued", "ENGINE_RESTARTING"), ("meanwhile", "ENGINE_RESTARTING")}
    assert set(caller.errors()) == expected
    service.link.facts = facts
    assert facts is not None
    service.link.on_frame(facts)
    await caller.generate("after")
    await service.link.added(3)
    service.link.step((3, TOKEN), finished=(done(3),))
    await until(lambda: caller.num_finished() == 1)
    caller.call.cancel()


async def test_a_full_queue_is_an_item_with_a_hint(service: Service) -> None:
    service.link.facts = FACTS
    caller = await running(service, *"abcd")
    await caller.generate("e")
    await until(lambda: bool(caller.errors()))
    assert caller.errors() == [("e", "QUEUE_FULL")]
    retry = error_details_pb2.RetryInfo()
    assert caller.items[0].error.details[1].Unpack(retry) and retry.retry_delay.ToMilliseconds() > 0
    caller.call.cancel()


async def test_an_internal_defect_reveals_no_details(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(prompt: Any, *args: Any) -> tuple[int, ...]:
        raise RuntimeError(prompt.text)

    monkeypatch.setattr(service.encoder, "encode", broken)
    caller = Caller(service.stub).read()
    await caller.generate("a", text="my secret prompt")
    await until(lambda: bool(caller.errors()))
    error = caller.items[0].error
    assert (error.code, reason(error)) == (Code.INTERNAL.value[0], "INTERNAL_FAILURE")
    assert "secret" not in error.message + caplog.text and "RuntimeError" in caplog.text and '"a"' in caplog.text
    caller.call.cancel()


# --- size ------------------------------------------------------------------------------------------------------------


async def test_an_item_may_be_as_large_as_a_call(service: Service) -> None:
    ids = pb.TokenIds(ids=[TOKEN] * 800_000)
    caller = Caller(service.stub).read()
    await caller.generate("large", text="x" * (31 * MiB))
    request = pb.GenerateRequest(request_id="ids", token_ids=ids)
    await caller.call.write(pb.MultiplexGenerateRequest(generate=request))
    await service.link.added(1)
    assert service.link.adds[0].request.request_id == "ids"
    await until(lambda: bool(caller.errors()))
    assert caller.errors() == [("large", "PROMPT_TOO_LONG")]
    caller.call.cancel()


async def test_a_large_item_of_too_many_fields_is_refused_unparsed(service: Service) -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage()] * 70_000)
    caller = Caller(service.stub).read()
    request = pb.GenerateRequest(request_id="many", chat=chat)
    await caller.call.write(pb.MultiplexGenerateRequest(generate=request))
    await until(lambda: bool(caller.errors()))
    assert caller.errors() == [("many", "INVALID_REQUEST")]
    assert info(caller.items[0].error).metadata["field"] == "generate.chat.messages"
    caller.call.cancel()


async def test_an_unknown_field_fails_its_request_alone(service: Service) -> None:
    caller = await running(service, "whole")
    newer = pb.GenerateRequest(request_id="newer", text="hi", sampling=pb.SamplingParams(seed=1))
    newer.sampling.MergeFromString(b"\xd0\x05\x01")  # field 90
    cancel = pb.MultiplexGenerateRequest.Cancel(request_id="whole")
    cancel.MergeFromString(b"\xd0\x05\x01")
    await caller.call.write(pb.MultiplexGenerateRequest(generate=newer))
    await caller.call.write(pb.MultiplexGenerateRequest(cancel=cancel))
    await caller.call.write(pb.MultiplexGenerateRequest.FromString(b"\x1a\x00"))  # an action that is new
    await until(lambda: len(caller.errors()) == 3)
    # The id of a request that runs stands in no refusal of another action: its caller would take it for ended.
    assert caller.errors() == [(each, "FEATURE_NOT_SUPPORTED") for each in ("newer", "", "")]
    paths = [info(item.error).metadata["field"] for item in caller.items if item.HasField("error")]
    assert paths == ["generate.sampling.90", "cancel.90", "3"]
    service.link.step((1, TOKEN), finished=(done(1),))
    await until(lambda: caller.num_finished() == 1)
    assert len(service.link.adds) == 1
    caller.call.cancel()


async def test_the_number_of_open_streams_is_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.server._inference.places.limit = 2
    callers = [await running(service, f"r{number}") for number in range(2)]
    error = await failure(service.stub.MultiplexGenerate(iter([])))
    assert (error.code(), info_of(error).reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    callers[0].call.cancel()
    await until(lambda: service.frontend.num_streams == 1)
    more = await running(service, "more")
    for caller in (callers[1], more):
        caller.call.cancel()


# --- ends of the stream ----------------------------------------------------------------------------------------------


async def test_a_storm_of_cancelled_streams_leaves_nothing(service: Service) -> None:
    draw = random.Random(1)

    async def come_and_go(name: int) -> None:
        caller = Caller(service.stub).read()
        with contextlib.suppress(asyncio.InvalidStateError):
            for number in range(draw.randrange(4)):
                await caller.generate(f"{name}-{number}", text=draw.choice(["hi", "held", "x" * 30_000]))
            await asyncio.sleep(draw.random() * 0.05)
        caller.call.cancel()

    for wave in range(3):
        await asyncio.gather(*[come_and_go(40 * wave + number) for number in range(40)])
    # A cancel may arrive after the request's end.
    await until(lambda: not any(call._members for call in service.calls))
    await service.is_at_rest()


async def test_an_action_that_arrives_with_the_end_starts_nothing() -> None:
    """The call ends while its reading task waits for gRPC."""

    async def admit(request: pb.GenerateRequest) -> Any:
        raise AssertionError

    class Late:
        async def __anext__(self) -> pb.MultiplexGenerateRequest:
            call.close()
            return pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(request_id="late"))

    call = MultiplexCall(admit, lambda request_id, error: None, FailureLog())
    await call.read(Late())  # type: ignore[arg-type]
    assert not call._members


@pytest.mark.parametrize("how", ["cancelled", "channel closed", "deadline"])
async def test_an_ended_stream_aborts_all_its_requests(service: Service, how: str) -> None:
    options = {"timeout": 1.0} if how == "deadline" else {}
    caller = await running(service, "a", "b", **options)
    await caller.generate("held", text="held")
    await until(lambda: service.encoder.num_waiting == 1)
    service.link.step((1, TOKEN))
    await until(lambda: len(caller.items) == 1)
    if how == "cancelled":
        caller.call.cancel()
    elif how == "channel closed":
        await service.channel.close()
    await service.is_at_rest()
    assert sorted(service.link.aborted) == [1, 2]
    assert len(service.link.adds) == 2
    if how == "deadline":
        assert await caller.call.code() is Code.DEADLINE_EXCEEDED


async def test_an_items_deadline_is_the_earlier_of_its_own_and_the_calls(service: Service) -> None:
    options = pb.SchedulingOptions()
    options.timeout.FromMilliseconds(1)
    caller = Caller(service.stub, timeout=60).read()
    await caller.generate("late", text="held", scheduling=options)
    # On a busy machine it may be late before it waits.
    await until(lambda: service.encoder.num_waiting == 1 or bool(caller.errors()))
    await asyncio.sleep(0.01)
    service.encoder.may_begin.set()
    await until(lambda: bool(caller.errors()))
    assert caller.errors() == [("late", "DEADLINE_PASSED")]
    await caller.generate("other")
    await service.link.added(1)
    assert service.link.adds[0].request.deadline_s is not None
    caller.call.cancel()


async def test_the_requests_of_a_retried_stream_take_the_places_of_earlier_ones(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC itself retries, and marks the second attempt."""
    refusals = [ModelLoading("loading", retry_after_s=0.01)]

    def check(self: inference.InferenceService) -> None:
        if refusals:
            raise refusals.pop()

    monkeypatch.setattr(inference.InferenceService, "_check_open", check)
    channel = open_channel(service.address, credentials=None, retries=4)
    caller = Caller(inference_pb2_grpc.InferenceServiceStub(channel)).read()
    await caller.generate("a")
    await service.link.added(1)
    assert service.link.adds[0].request.replaces and not refusals
    await channel.close()


async def test_a_drain_lets_running_requests_finish_and_then_ends_the_stream(service: Service) -> None:
    caller, idle = await running(service, "a"), await running(service)
    await idle.generate("", "x")
    await until(lambda: len(idle.errors()) == 1)
    stopping = asyncio.create_task(service.server.drain_and_stop(30))
    assert await idle.call.code() is Code.UNAVAILABLE
    await caller.generate("new")
    await until(lambda: caller.errors() == [("new", "DRAINING")])
    service.link.step((1, TOKEN), finished=(done(1),))
    assert await caller.call.code() is Code.UNAVAILABLE
    assert "draining" in await caller.call.details()
    status = status_pb2.Status.FromString(dict(await caller.call.trailing_metadata())["grpc-status-details-bin"])
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
    assert caller.num_finished() == 1
    await asyncio.wait_for(stopping, 120)


async def test_at_the_limit_of_a_drain_every_request_gets_an_error(service: Service) -> None:
    caller = await running(service, "a", "b")
    await service.server.drain_and_stop(0.1)
    assert await caller.call.code() is Code.UNAVAILABLE
    assert sorted(caller.errors()) == [("a", "DRAINING"), ("b", "DRAINING")]
    assert sorted(service.link.aborted) == [1, 2]


async def test_requests_belong_to_their_key_and_count_against_its_quota(tmp_path: Path) -> None:
    """A request beyond the quota, or after its key was removed, fails as an item; an id is separate for each key."""
    keys = write_keys(tmp_path / "keys.toml", block("a", "secret-a", max_concurrent=2), block("b", "secret-b"))
    ring, link = KeyRing(str(keys)), RoomyLink()
    rules = CallRules(FailureLog(), keys=ApiKeys(ring, ("none",)))
    with frontend(link=link, quotas=FrontendQuotas(Quotas(ring.limits))) as (front, _):
        async with serving(front, rules=rules) as address, grpc.aio.insecure_channel(address) as channel:  # type: ignore[arg-type]
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            callers = [Caller(stub, metadata=bearer(secret)).read() for secret in ("secret-a", "secret-b")]
            for number, request_id in enumerate(("one", "two")):
                for caller in callers:
                    await caller.generate(request_id)
                await link.added(2 * number + 2)
            for caller in callers:
                await caller.generate("three")
            await link.added(5)
            await until(lambda: bool(callers[0].errors()))
            assert callers[0].errors() == [("three", "QUOTA_EXCEEDED")] and not callers[1].errors()
            owned = Counter((add.request.owner, add.request.request_id) for add in link.adds)
            expected = [("a", "one"), ("a", "two"), ("b", "one"), ("b", "two"), ("b", "three")]
            assert owned == Counter(expected)
            write_keys(keys, block("a", "secret-a"), block("b", "another"))
            ring.look()
            await callers[1].generate("four")
            await until(lambda: bool(callers[1].errors()))
            assert callers[1].errors() == [("four", "INVALID_CREDENTIALS")]
            for caller in callers:
                caller.call.cancel()
            await until(lambda: not front.num_streams)
