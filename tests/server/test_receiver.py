"""Receiving of messages: none, half of one, slow ones, large ones, many at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from photon_grpc.errors import QueueFull
from photon_grpc.server.calls import guard, receiver
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack import http2
from tests.server.failing import failure, info_of, trailer
from tests.server.fake_frontend import ASK, GENERATE, STREAM_GENERATE, FakeFrontend, raw, serving, until

HEALTH = "/grpc.health.v1.Health/Check"
MiB = 2**20


@pytest.fixture
def small_receiver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., receiver.MessageReceiver]:
    """Return a function that makes the next server's receiver, with limits that a test can reach."""

    def make(**limits: int) -> receiver.MessageReceiver:
        made = receiver.MessageReceiver(**limits)
        monkeypatch.setattr(guard, "MessageReceiver", lambda reading: made)
        return made

    return make


@pytest.mark.parametrize("path", [GENERATE, STREAM_GENERATE, HEALTH])
@pytest.mark.parametrize("data", [None, b"\0\0\0\0\x09half"], ids=["no message", "half a message"])
async def test_a_call_that_ends_without_its_message_is_answered(address: str, path: str, data: bytes | None) -> None:
    def ends() -> bool:
        with http2.connected(address, 10.0) as connection:
            connection.call(1, path, data)
            return connection.is_answered(1)

    assert await asyncio.to_thread(ends)


@pytest.mark.parametrize("method", [GENERATE, STREAM_GENERATE])
async def test_a_missing_message_is_malformed(channel: grpc.aio.Channel, method: str) -> None:
    make = channel.stream_stream if method == STREAM_GENERATE else channel.stream_unary
    call = make(method, request_serializer=None, response_deserializer=None)(nothing())
    error = await failure(call)
    assert (error.code(), info_of(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


@pytest.mark.parametrize("path", ["chat.messages", "structured_output.choices.values", "chat.messages.name"])
async def test_a_message_of_too_many_fields_is_refused_before_it_is_parsed(
    channel: grpc.aio.Channel, frontend: FakeFrontend, path: str
) -> None:
    fields, descriptor = [], pb.GenerateRequest.DESCRIPTOR
    for name in path.split("."):
        fields.append(descriptor.fields_by_name[name])
        descriptor = fields[-1].message_type
    message = bytes([fields.pop().number << 3 | 2, 0]) * 70_000
    for field in reversed(fields):
        message = bytes([field.number << 3 | 2]) + varint(len(message)) + message
    error = await failure(raw(channel, GENERATE)(message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(info_of(error).metadata) == {"field": path, "needed": "65537", "limit": "65536"}
    assert frontend.asks == []


async def test_large_messages_arrive_whole(
    inference: inference_pb2_grpc.InferenceServiceStub, frontend: FakeFrontend
) -> None:
    texts = ["é" * MiB, "x" * 4 * MiB, "y" * 20_000]
    await asyncio.gather(*[inference.Generate(pb.GenerateRequest(text=text)) for text in texts])
    assert sorted(ask.input.text for ask in frontend.asks) == sorted(texts)  # type: ignore[union-attr]


async def test_unparsed_bytes_are_bounded(
    small_receiver: Callable[..., receiver.MessageReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small_receiver(max_unparsed_bytes=3 * MiB)
    gate = asyncio.Event()
    inside = 0

    async def wait(self: receiver.MessageReceiver, message: bytes, parse: Any) -> Any:
        nonlocal inside
        inside += 1
        await gate.wait()
        return receiver.parsed(message, parse)

    loop_run = asyncio.get_running_loop().run_in_executor

    def run(pool: object, work: Any, *args: Any) -> Any:
        return wait(made, *args) if work is receiver._counted_and_parsed else loop_run(pool, work, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", run)
    async with serving(FakeFrontend()) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        large = [stub.Generate(pb.GenerateRequest(text="x" * MiB)) for _ in range(3)]
        await until(lambda: inside == 1 and made._unparsed.waiting.size > 2 * MiB)
        error = await failure(stub.Generate(pb.GenerateRequest(text="x" * MiB)))
        assert (error.code(), info_of(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert trailer(error, "grpc-retry-pushback-ms")
        await stub.Generate(ASK)
        gate.set()
        await asyncio.gather(*large)
    assert made._unparsed.waiting.size == 0 and made._unparsed.num_free == 1


async def test_slow_senders_do_not_block_others(
    small_receiver: Callable[..., receiver.MessageReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone they may take their time; while others wait, they are ended with a reason."""
    monkeypatch.setattr(receiver, "_GRACE_S", 0.3)
    made = small_receiver(max_receiving=2)
    async with serving(FakeFrontend()) as address, grpc.aio.insecure_channel(address) as channel:
        slow = [channel.stream_unary(GENERATE)(nothing(for_ever=True)) for _ in range(2)]
        await until(lambda: len(made._receiving) == 2)
        await asyncio.sleep(0.5)
        assert not any(call.done() for call in slow)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.wait_for(asyncio.gather(*[stub.Generate(ASK) for _ in range(20)]), 120)
        for call in slow:
            error = await failure(call)
            assert (error.code(), info_of(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert trailer(error, "x-request-id")
    assert not made._receiving and made.turns.num_free == 2


async def test_the_newest_is_received_first(small_receiver: Callable[..., receiver.MessageReceiver]) -> None:
    """A call that arrives while a hundred wait does not wait for all of them."""
    made = small_receiver(max_receiving=1)
    order: list[int] = []

    async def receive(number: int) -> None:
        await made.turns.take("a")
        order.append(number)
        made.turns.give_back("a")

    await made.turns.take("a")
    tasks = [asyncio.create_task(receive(number)) for number in range(5)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    made.turns.give_back("a")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [4, 2, 1, 0]
    assert made.turns.num_free == 1


async def test_a_cancelled_call_frees_its_place(small_receiver: Callable[..., receiver.MessageReceiver]) -> None:
    made = small_receiver(max_receiving=1)
    async with serving(FakeFrontend()) as address, grpc.aio.insecure_channel(address) as channel:
        calls = [channel.stream_unary(GENERATE)(nothing(for_ever=True)) for _ in range(3)]
        await until(lambda: made.turns.waiting.size == 2)
        for call in calls:
            call.cancel()
        await asyncio.wait_for(inference_pb2_grpc.InferenceServiceStub(channel).Generate(ASK), 120)
    assert made.turns.num_free == 1 and not made.turns.owners_waiting() and not made._receiving


@pytest.mark.parametrize("outcome", ["OK", "refused", "malformed"])
async def test_nothing_of_a_message_outlives_its_call(
    channel: grpc.aio.Channel, frontend: FakeFrontend, outcome: str
) -> None:
    """No garbage collection is needed: messages of 32 MiB would become gigabytes before it runs."""
    message = pb.GenerateRequest(text="x" * MiB).SerializeToString()
    if outcome == "malformed":
        message = message[:-1] + b"\xff"
    frontend.refusals = [QueueFull("not now") for _ in range(8) if outcome == "refused"]
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(8):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await raw(channel, GENERATE)(message)
        frontend.asks.clear()
        await asyncio.sleep(0.05)
        assert tracemalloc.get_traced_memory()[0] < 4 * MiB
    finally:
        tracemalloc.stop()
        gc.enable()


async def nothing(*, for_ever: bool = False) -> AsyncIterator[bytes]:
    if for_ever:
        await asyncio.Event().wait()
    for message in ():
        yield message


def varint(value: int) -> bytes:
    data = b""
    while value >= 0x80:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


@pytest.mark.parametrize("by_host", [False, True])
async def test_a_connection_with_endless_calls_blocks_only_its_own(
    small_receiver: Callable[..., receiver.MessageReceiver], by_host: bool
) -> None:
    made = small_receiver(max_receiving=1)
    order: list[str] = []

    async def receive(connection: str, number: int) -> None:
        owner = connection if by_host else "one host"
        await made.turns.take(owner, connection=connection)
        order.append(f"{connection}{number}")
        made.turns.give_back(owner)

    await made.turns.take("a")
    tasks = [asyncio.create_task(receive("a", number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(receive("b", number)) for number in range(2)]
    await asyncio.sleep(0)
    made.turns.give_back("a")
    await asyncio.gather(*tasks)
    assert order == ["a3", "b1", "a2", "b0", "a1", "a0"]
    assert made.turns.num_free == 1 and not made.turns.owners_waiting() and not made.turns.waiting.size


async def test_with_too_many_waiting_calls_the_oldest_of_the_connection_is_refused(
    small_receiver: Callable[..., receiver.MessageReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "MAX_WAITING", 2)
    made = small_receiver(max_receiving=1)
    await made.turns.take("a")
    tasks = [asyncio.create_task(made.turns.take("b")) for _ in range(3)]
    with pytest.raises(QueueFull) as refused:
        await tasks[0]
    assert (refused.value.needed, refused.value.limit) == (3, 2)
    assert not tasks[1].done() and not tasks[2].done()
    made.turns.give_back("a")
    await tasks[2]
    made.turns.give_back("b")
    await tasks[1]
    made.turns.give_back("b")
    assert made.turns.num_free == 1 and not made.turns.waiting.size


async def test_calls_without_a_message_leave_others_served(address: str) -> None:
    """One connection sends more of them than may be received or cut off at a time."""
    async with grpc.aio.insecure_channel(address) as hostile, grpc.aio.insecure_channel(address) as channel:
        calls = [hostile.stream_unary(GENERATE)(nothing(for_ever=True)) for _ in range(200)]
        await asyncio.sleep(0.1)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.wait_for(asyncio.gather(*[stub.Generate(ASK) for _ in range(4)]), 120)
        for call in calls:
            call.cancel()


async def test_a_large_message_of_a_stream_is_refused(channel: grpc.aio.Channel) -> None:
    reflect = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    error = await failure(reflect(iter([b"x" * 70_000])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(info_of(error).metadata)["limit"] == "65536"
