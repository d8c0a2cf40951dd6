"""Generate and StreamGenerate over a real channel: order, ids, cancellation, deadlines, retries."""

from __future__ import annotations

import asyncio
import json
import time

import grpc
import pytest

from photon_grpc.errors import DeadlineUnreachable, ModelLoading
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.server.fake_frontend import ASK, HELLO, FakeFrontend, for_ever, until

Stub = inference_pb2_grpc.InferenceServiceStub
METHODS = ["Generate", "StreamGenerate"]


async def drained(call: object) -> list[pb.StreamGenerateResponse]:
    return [message async for message in call]


async def answered(call: object) -> object:
    return await drained(call) if hasattr(call, "__aiter__") else await call


async def test_generate_returns_every_requested_field(inference: Stub) -> None:
    response = await inference.Generate(pb.GenerateRequest(text="hi", request_id="r1", model="demo"))
    assert (response.request_id, response.model) == ("r1", "demo")
    assert (response.outputs[0].text, response.outputs[0].finish.eos_token_id) == ("hello!", 2)
    assert (response.usage.prompt_tokens, response.timing.preemption_count) == (3, 2)


async def test_a_stream_counts_its_messages_and_starts_and_ends_once(inference: Stub) -> None:
    messages = await drained(inference.StreamGenerate(pb.GenerateRequest(text="hi", request_id="r1")))
    assert [message.sequence for message in messages] == [1, 2, 3]
    assert "".join(message.deltas[0].text for message in messages) == "hello!"
    assert [message.HasField("start") for message in messages] == [True, False, False]
    assert messages[0].start.request_id == "r1"
    for part in ("usage", "timing"):
        assert [message.HasField(part) for message in messages] == [False, False, True]
    assert messages[-1].deltas[0].HasField("finish")


async def test_a_finished_stream_is_closed(inference: Stub, frontend: FakeFrontend) -> None:
    await drained(inference.StreamGenerate(ASK))
    await asyncio.wait_for(frontend.streams[0].closed.wait(), 120)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("field", "header", "expected"),
    [("mine", "theirs", "mine"), ("", "theirs", "theirs"), ("mine", None, "mine"), ("x" * 128, None, "x" * 128)],
)
async def test_the_field_wins_over_the_header(
    inference: Stub, frontend: FakeFrontend, method: str, field: str, header: str | None, expected: str
) -> None:
    metadata = (("x-request-id", header),) if header is not None else ()
    call = getattr(inference, method)(pb.GenerateRequest(text="hi", request_id=field), metadata=metadata)
    await answered(call)
    assert frontend.asks[0].origin.request_id == expected
    assert dict(await call.initial_metadata())["x-request-id"] == expected


async def test_a_call_without_id_gets_one_of_its_own(inference: Stub, frontend: FakeFrontend) -> None:
    responses = [await inference.Generate(ASK) for _ in range(3)]
    request_ids = {response.request_id for response in responses}
    assert len(request_ids) == 3
    assert {ask.origin.request_id for ask in frontend.asks} == request_ids
    assert all(request_ids)


@pytest.mark.parametrize("method", METHODS)
async def test_cancelling_closes_the_stream(inference: Stub, frontend: FakeFrontend, method: str) -> None:
    frontend.script = [HELLO[0], for_ever]
    call = getattr(inference, method)(ASK)
    reading = asyncio.create_task(answered(call))
    await until(lambda: bool(frontend.streams))
    call.cancel()
    await asyncio.wait_for(frontend.streams[0].closed.wait(), 120)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_losing_the_connection_closes_the_stream(address: str, frontend: FakeFrontend) -> None:
    frontend.script = [HELLO[0], for_ever]
    channel = grpc.aio.insecure_channel(address)
    call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(ASK)
    assert (await call.read()).sequence == 1
    await channel.close()
    await asyncio.wait_for(frontend.streams[0].closed.wait(), 120)


@pytest.mark.parametrize("method", METHODS)
async def test_the_deadline_of_the_call_reaches_the_ask_and_closes_the_stream(
    channel: grpc.aio.Channel, inference: Stub, frontend: FakeFrontend, method: str
) -> None:
    frontend.script = [HELLO[0], for_ever]
    await channel.channel_ready()
    begin_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answered(getattr(inference, method)(ASK, timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(frontend.streams[0].closed.wait(), 120)
    ask = frontend.asks[0]
    assert begin_s < ask.origin.deadline_s <= time.monotonic() + 0.3
    assert begin_s <= ask.origin.arrival_s <= time.monotonic()


async def test_a_call_without_deadline_has_none(inference: Stub, frontend: FakeFrontend) -> None:
    await inference.Generate(ASK)
    assert frontend.asks[0].origin.deadline_s is None
    assert frontend.asks[0].replaces is False


async def test_a_refused_deadline_is_deadline_exceeded(inference: Stub, frontend: FakeFrontend) -> None:
    frontend.refusals = [DeadlineUnreachable("needs 3 s, has 1 s")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference.Generate(ASK, timeout=100)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "needs 3 s, has 1 s")


@pytest.mark.parametrize("method", METHODS)
async def test_gRPC_itself_retries_what_is_unavailable(address: str, frontend: FakeFrontend, method: str) -> None:
    """A failed call sends no initial metadata: with it, no client would ever retry."""
    frontend.refusals = [ModelLoading("loading", retry_after_s=0.01) for _ in range(3)]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    async with grpc.aio.insecure_channel(address, options=(("grpc.service_config", json.dumps(config)),)) as channel:
        call = getattr(inference_pb2_grpc.InferenceServiceStub(channel), method)
        await answered(call(pb.GenerateRequest(text="hi", request_id="same")))
    assert [ask.origin.request_id for ask in frontend.asks] == ["same"] * 4
    assert [ask.replaces for ask in frontend.asks] == [False, True, True, True]


async def test_many_streams_at_once_stay_apart(inference: Stub, frontend: FakeFrontend) -> None:
    frontend.script = [HELLO[0], lambda: asyncio.sleep(0.01), *HELLO[1:]]
    calls = [inference.StreamGenerate(pb.GenerateRequest(text="hi", request_id=f"r{i}")) for i in range(50)]
    for i, messages in enumerate(await asyncio.gather(*(drained(call) for call in calls))):
        assert messages[0].start.request_id == f"r{i}"
        assert "".join(message.deltas[0].text for message in messages) == "hello!"
