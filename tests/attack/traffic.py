"""Callers of every kind, all at once: whole answers, streams to the end and streams left, deadlines, slow readers,
shared streams, constrained outputs, connections that vanish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc, model_pb2, model_pb2_grpc
from tests.attack import http2
from tests.attack.http2 import DATA, END_HEADERS, HEADERS, Connection, connected, frame

STREAM_GENERATE = "/photon_grpc.v1.InferenceService/StreamGenerate"
_CALL_LIMIT_S = 60.0
_UNREAD_S = 1.0
_FROM_OTHERS = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


def request(draw: random.Random) -> pb.GenerateRequest:
    """Of a prompt that needs several steps of prefill, or one, and often of a beginning that is cached."""
    ids = [*range(10, 10 + draw.choice((0, 30))), *(draw.randrange(4, 4000) for _ in range(draw.choice((1, 20, 90))))]
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    asked.stop.max_tokens = draw.choice((1, 2, 20, 60))
    asked.stop.ignore_eos = True
    asked.sampling.num_outputs = draw.choice((1, 1, 1, 3))
    asked.sampling.temperature = draw.choice((0.0, 1.0))
    asked.output.text = draw.random() < 0.5
    return asked


class Caller:
    """One that calls again and again, first as its number says, then as it is drawn."""

    def __init__(self, address: str, number: int, draw: random.Random) -> None:
        self._address = address
        self._number = number
        self._draw = draw
        self._end_s = 0.0
        self.told: Counter[str] = Counter()

    async def call_until(self, end_s: float) -> None:
        self._end_s = end_s
        kinds: list[Callable[[grpc.aio.Channel], Awaitable[None]]] = [
            *(self._whole, self._read, self._leave, self._hurry, self._dawdle, self._share, self._constrain),
            *(self._tokenize, self._vanish, self._read_nothing),
        ]
        kind = kinds[self._number % len(kinds)]
        while time.monotonic() < end_s:
            # As callers that come and go: a few calls on a connection of its own.
            async with grpc.aio.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                for _ in range(self._draw.randrange(1, 20)):
                    if time.monotonic() < end_s:
                        await self._one(kind, channel)
                        kind = self._draw.choice(kinds)

    async def _one(self, kind: Callable[[grpc.aio.Channel], Awaitable[None]], channel: grpc.aio.Channel) -> None:
        name = kind.__name__.strip("_").replace("_", " ")
        try:
            await kind(channel)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _FROM_OTHERS:
                name = f"{error.code().name}: {error.details()}"
        self.told[name] += 1

    def _stream(self, channel: grpc.aio.Channel, limit_s: float = _CALL_LIMIT_S) -> grpc.aio.UnaryStreamCall:
        return inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request(self._draw), timeout=limit_s)

    async def _whole(self, channel: grpc.aio.Channel) -> None:
        await inference_pb2_grpc.InferenceServiceStub(channel).Generate(request(self._draw), timeout=_CALL_LIMIT_S)

    async def _read(self, channel: grpc.aio.Channel) -> None:
        async for _ in self._stream(channel):
            pass

    async def _leave(self, channel: grpc.aio.Channel) -> None:
        call = self._stream(channel)
        for _ in range(self._draw.randrange(4)):
            await call.read()
        call.cancel()

    async def _hurry(self, channel: grpc.aio.Channel) -> None:
        async for _ in self._stream(channel, self._draw.random() / 5):
            pass

    async def _dawdle(self, channel: grpc.aio.Channel) -> None:
        async for _ in self._stream(channel):
            if time.monotonic() < self._end_s:
                await asyncio.sleep(self._draw.random() / 5)

    async def _share(self, channel: grpc.aio.Channel) -> None:
        """A stream of several requests, some of them ended by name."""
        names = [f"{self._draw.getrandbits(60):x}" for _ in range(self._draw.randrange(1, 12))]
        call = inference_pb2_grpc.InferenceServiceStub(channel).MultiplexGenerate(
            self._actions(names), timeout=_CALL_LIMIT_S
        )
        async for message in call:
            for item in message.items:
                if item.error.code in (grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.UNKNOWN.value[0]):
                    self.told[f"item {item.error.code}: {item.error.message}"] += 1

    async def _actions(self, names: list[str]) -> AsyncIterator[pb.MultiplexGenerateRequest]:
        for name in names:
            asked = request(self._draw)
            asked.request_id = name
            yield pb.MultiplexGenerateRequest(generate=asked)
            if self._draw.random() < 0.3:
                await asyncio.sleep(self._draw.random() / 10)
                cancel = pb.MultiplexGenerateRequest.Cancel(request_id=self._draw.choice(names))
                yield pb.MultiplexGenerateRequest(cancel=cancel)

    async def _constrain(self, channel: grpc.aio.Channel) -> None:
        """By a schema that was not seen before, or by one that was."""
        key = f"k{self._draw.randrange(5_000)}"
        schema = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
        asked = pb.GenerateRequest(text="def", structured_output=pb.StructuredOutput(json_schema=json.dumps(schema)))
        asked.stop.max_tokens = 12
        await inference_pb2_grpc.InferenceServiceStub(channel).Generate(asked, timeout=_CALL_LIMIT_S)

    async def _tokenize(self, channel: grpc.aio.Channel) -> None:
        """What is large goes to the encoder."""
        text = "def fib(n):\n" * self._draw.choice((1, 5_000))
        asked = model_pb2.TokenizeRequest(text=text)
        await model_pb2_grpc.ModelServiceStub(channel).Tokenize(asked, timeout=_CALL_LIMIT_S)

    async def _vanish(self, channel: grpc.aio.Channel) -> None:
        await asyncio.to_thread(self._vanish_now)

    def _vanish_now(self) -> None:
        connection = Connection(self._address)
        headers = frame(HEADERS, END_HEADERS, 1, http2.header_block(STREAM_GENERATE))
        data = frame(DATA, self._draw.choice((0, 1)), 1, http2.grpc_message(request(self._draw).SerializeToString()))
        said = headers + data
        connection.send(said[: self._draw.choice((0, len(headers), len(headers) + 12, len(said)))])
        connection.vanish()

    async def _read_nothing(self, channel: grpc.aio.Channel) -> None:
        """One that may be sent no byte, for a while."""
        with contextlib.ExitStack() as stack:
            reader = await asyncio.to_thread(stack.enter_context, connected(self._address, window=0))
            reader.call(1, STREAM_GENERATE, http2.grpc_message(request(self._draw).SerializeToString()))
            await asyncio.sleep(_UNREAD_S)


async def traffic(address: str, num_callers: int, seed: int, seconds: float) -> Counter[str]:
    """How often each kind called, and what came back that should not."""
    callers = [Caller(address, number, random.Random(f"{seed} {number}")) for number in range(num_callers)]
    end_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(caller.call_until(end_s))
    told: Counter[str] = Counter()
    for caller in callers:
        told.update(caller.told)
    return told
