"""Every request has one record, however it arrived and ended; no record holds text from a caller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import msgspec
import pytest

from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.frames import Failed, Started
from photon_grpc.core.generation import Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import DeadlinePassed, DeadlineUnreachable, KVCapacity, NumericFailure
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.quotas import NoFrontendQuotas, QuotaLease
from photon_grpc.frontend.record import Observers, RequestRecord
from photon_grpc.server.server import Server
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.fake_engine import FACTS, FakeLink, done, served
from tests.server.fake_frontend import until

TOKEN = 70
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
METHODS = ("Generate", "StreamGenerate", "MultiplexGenerate")
SECRET = "a secret"


class Broken:
    def ended(self, record: RequestRecord) -> None:
        raise RuntimeError("an observer of no use")


class Bill(QuotaLease, NoFrontendQuotas):
    """A share of the quota that records what a request charges to its owner."""

    def __init__(self) -> None:
        self.output_tokens: list[int] = []

    def lease(self, owner: str, deadline_s: float | None) -> QuotaLease:
        return self

    def end(self, num_output_tokens: int) -> None:
        self.output_tokens.append(num_output_tokens)


class Service:
    """A server with a real front end and an engine that a test scripts."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.records: list[RequestRecord] = []
        self.bill = Bill()
        self.link = FakeLink(msgspec.structs.replace(FACTS, max_queue_size=100, max_queued_tokens=1000))
        self.frontend = Frontend(
            link=self.link,
            model=served(),
            encoder=ThreadEncoder(served(), pool),
            quotas=self.bill,
            observers=Observers([Broken(), self]),
        )
        self.server = Server(self.frontend, config=ServerConfig())
        self.stub: inference_pb2_grpc.InferenceServiceStub

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)

    async def record(self) -> RequestRecord:
        """Return the only record."""
        await until(lambda: bool(self.records))
        await until(lambda: not self.frontend.num_streams)
        (record,) = self.records
        assert SECRET not in repr(record)
        assert 0 <= record.total_s < 60
        return record

    def call(self, method: str, **fields: Any) -> asyncio.Task[None]:
        """Start a caller that reads to the end, whatever that is."""
        request = pb.GenerateRequest(**({"request_id": "r", "text": SECRET} | fields))
        metadata = (("traceparent", TRACEPARENT),)
        if method == "MultiplexGenerate":
            actions = [pb.MultiplexGenerateRequest(generate=request)]
            call: Any = self.stub.MultiplexGenerate(iter(actions), metadata=metadata)
        else:
            call = getattr(self.stub, method)(request, metadata=metadata)
        return asyncio.create_task(outcome(call))

    async def begun(self, method: str, **fields: Any) -> asyncio.Task[None]:
        """Start a caller, and wait until it has its first token."""
        caller = self.call(method, **fields)
        await self.link.added(1)
        self.link.step((1, TOKEN), started=(Started(1, 3, 0.0),))
        return caller


async def outcome(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            async for _ in call:
                pass


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    with ThreadPoolExecutor(1) as pool:
        service = Service(pool)
        (address,) = await service.server.start(("127.0.0.1:0",), reuse_port=False)
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            service.stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield service
        await service.server.drain_and_stop(0)


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_that_is_answered(service: Service, method: str) -> None:
    caller = await service.begun(method)
    num_prompt = service.link.adds[0].request.num_given
    service.link.step(preempted=(1,))
    service.link.step((1, TOKEN), finished=(done(1, FinishReason.MAX_TOKENS, 2, 3),))
    await caller
    record = await service.record()
    origin = record.origin
    assert (origin.request_id, origin.method, origin.model, origin.owner) == ("r", method, "small", "")
    assert origin.traceparent == TRACEPARENT
    assert (record.reason, record.finish_reasons) == ("", (FinishReason.MAX_TOKENS,))
    assert record.usage == Usage(num_prompt, 3, 2)
    assert record.num_preemptions == 1
    assert record.queue_s == 0.0
    assert record.first_token_s is not None and record.last_token_s is not None
    assert 0 < record.first_token_s <= record.last_token_s <= record.total_s
    assert record.prefill_s == record.first_token_s
    assert record.time_per_output_token_s == record.decode_s == record.last_token_s - record.first_token_s


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_whose_caller_leaves_is_billed_for_what_was_delivered(service: Service, method: str) -> None:
    outputs = {"sampling": pb.SamplingParams(num_outputs=2)}
    caller = await service.begun(method, **outputs)
    service.link.step((2, TOKEN), finished=(done(2, num_generated=1),), started=(Started(2, 3, 0.0),))
    await until(lambda: bool(service.frontend.num_streams))
    caller.cancel()
    record = await service.record()
    assert record.reason == "CANCELLED"
    assert record.finish_reasons == (FinishReason.UNSPECIFIED, FinishReason.MAX_TOKENS)
    assert record.usage == Usage(service.link.adds[0].request.num_given, 3, 2)
    assert service.link.aborted == [1]


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_that_never_had_a_step_is_billed_nothing(service: Service, method: str) -> None:
    caller = service.call(method)
    await service.link.added(1)
    caller.cancel()
    record = await service.record()
    assert (record.reason, record.usage, record.queue_s) == ("CANCELLED", Usage(), None)
    assert record.first_token_s is record.time_per_output_token_s is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("fields", "reason", "model"),
    [
        ({"model": SECRET}, "MODEL_NOT_FOUND", ""),
        ({"sampling": {"temperature": -1}}, "INVALID_REQUEST", "small"),
        ({"sampling": {"num_outputs": 1000}}, "INVALID_REQUEST", "small"),
        ({"text": SECRET * 200}, "PROMPT_TOO_LONG", "small"),
        ({"scheduling": {"timeout": {"seconds": -1}}}, "INVALID_REQUEST", "small"),
    ],
)
async def test_a_request_that_is_refused(
    service: Service, method: str, fields: dict[str, Any], reason: str, model: str
) -> None:
    await service.call(method, **fields)
    record = await service.record()
    assert (record.reason, record.origin.model, record.usage) == (reason, model, Usage())
    assert (record.origin.request_id, record.origin.method, record.finish_reasons) == ("r", method, ())


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_that_the_engine_fails(service: Service, method: str) -> None:
    caller = await service.begun(method)
    service.link.step(failed=(Failed.of(1, NumericFailure("not a number")),))
    await caller
    record = await service.record()
    assert (record.reason, record.usage.output_tokens) == ("NUMERIC_FAILURE", 0 if method == "Generate" else 1)


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_that_the_engine_refuses(service: Service, method: str) -> None:
    caller = service.call(method)
    await service.link.added(1)
    service.link.step(failed=(Failed.of(1, KVCapacity("too large")),))
    await caller
    assert (await service.record()).reason == "KV_CAPACITY"


@pytest.mark.parametrize(
    ("method", "reason"), [("Generate", "ENGINE_RESTARTING"), ("StreamGenerate", "ENGINE_FAILURE")]
)
async def test_a_lost_engine_is_recorded_with_the_status_that_the_caller_got(
    service: Service, method: str, reason: str
) -> None:
    caller = await service.begun(method)
    if method == "StreamGenerate":
        (stream,) = service.frontend._streams
        await until(lambda: stream._has_sent)
    service.link.step((1, TOKEN))
    service.link.lose()
    await caller
    record = await service.record()
    assert record.reason == reason
    # A unary call had received nothing.
    assert (record.usage.output_tokens, record.longest_output_tokens) == ((0, 0) if method == "Generate" else (2, 2))
    assert service.bill.output_tokens == [record.usage.output_tokens]


async def test_a_unary_call_past_its_deadline_is_billed_for_what_was_computed(service: Service) -> None:
    caller = await service.begun("Generate")
    service.link.step(failed=(Failed.of(1, DeadlinePassed("the deadline passed")),))
    await caller
    record = await service.record()
    assert (record.reason, record.usage.output_tokens) == ("DEADLINE_PASSED", 1)


async def test_a_unary_call_with_an_unreachable_deadline_is_billed_for_no_output(service: Service) -> None:
    caller = await service.begun("Generate")
    service.link.step(failed=(Failed.of(1, DeadlineUnreachable("needs 3 s, has 1 s")),))
    await caller
    record = await service.record()
    assert (record.reason, record.usage.output_tokens) == ("DEADLINE_UNREACHABLE", 0)


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_passed_deadline_is_distinguished_from_a_caller_that_leaves(
    service: Service, method: str, has_begun: bool
) -> None:
    call = getattr(service.stub, method)(pb.GenerateRequest(request_id="r", text=SECRET), timeout=1.0)
    caller = asyncio.create_task(outcome(call))
    await service.link.added(1)
    if has_begun:
        service.link.step((1, TOKEN), started=(Started(1, 3, 0.0),))
    await caller
    assert (await service.record()).reason == "DEADLINE_PASSED"


async def test_requests_of_one_stream_have_a_record_each(service: Service) -> None:
    def generate(request_id: str) -> pb.MultiplexGenerateRequest:
        return pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(request_id=request_id, text=SECRET))

    call = service.stub.MultiplexGenerate()
    await call.write(generate("a"))
    await service.link.added(1)
    await call.write(generate("b"))
    await service.link.added(2)
    await call.write(generate("a"))
    await call.write(generate(""))
    await call.write(pb.MultiplexGenerateRequest(cancel={"request_id": "a"}))
    await until(lambda: len(service.records) == 3)
    service.link.step((2, TOKEN), finished=(done(2, num_generated=1),), started=(Started(2, 3, 0.0),))
    await call.done_writing()
    await outcome(call)
    reasons = [(record.origin.request_id, record.reason) for record in service.records]
    assert reasons == [("a", "DUPLICATE_REQUEST_ID"), ("", "INVALID_REQUEST"), ("a", "CANCELLED"), ("b", "")]


async def test_a_reader_that_is_cut_off_is_distinguished_from_one_that_left(service: Service) -> None:
    async def write(context: Any, message: Any) -> None:
        raise DeadlinePassed("the reader took no message")

    service.server._writer.write = write  # type: ignore[method-assign]
    await (await service.begun("StreamGenerate"))
    assert (await service.record()).reason == "DEADLINE_PASSED"
