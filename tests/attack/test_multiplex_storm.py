"""Thousands of requests on a few streams, half of them cancelled, and one stream that is hardly read: each request ends
once, and nothing of them stays."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack.answers import together
from tests.attack.figures import Figures
from tests.attack.size import Size
from tests.attack.test_storms import request, storm
from tests.attack.victim import Victim

NUM_STREAMS = 4
#: Requests of one stream whose end it has not read.
_IN_FLIGHT = 32
_LIMIT_S = 300.0


class Stream:
    """One call with many requests, and how each of them ended."""

    def __init__(self, call: Any, number: int, slowness_s: float) -> None:
        """Take each message `slowness_s` after the one before."""
        self.ends: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self._call = call
        self._number = number
        self._slowness_s = slowness_s
        self._draw = random.Random(number)
        self._room = asyncio.Semaphore(_IN_FLIGHT)
        self._ids: dict[int, str] = {}

    async def play(self, count: int) -> None:
        async with asyncio.timeout(_LIMIT_S):
            await asyncio.gather(self._write(count), self._read())

    def request_id(self, number: int) -> str:
        return f"{self._number}-{number}"

    async def _write(self, count: int) -> None:
        for number in range(count):
            await self._room.acquire()
            asked = request(self._draw)
            asked.request_id = self.request_id(number)
            await self._call.write(pb.MultiplexGenerateRequest(generate=asked))
            if self._draw.random() < 0.5:
                victim = self.request_id(max(0, number - self._draw.choice((0, 0, 1, 5, 20))))
                cancel = pb.MultiplexGenerateRequest.Cancel(request_id=victim)
                await self._call.write(pb.MultiplexGenerateRequest(cancel=cancel))
        await self._call.done_writing()

    async def _read(self) -> None:
        while (frame := await self._call.read()) is not grpc.aio.EOF:
            for item in frame.items:
                self._ids.setdefault(item.handle, item.request_id)
                if item.HasField("error"):
                    self._ended(item.handle, _reason(item.error))
                elif item.response.HasField("timing"):
                    self._ended(item.handle, "OK")
            if self._slowness_s:
                await asyncio.sleep(self._slowness_s)

    def _ended(self, handle: int, how: str) -> None:
        self.ends[self._ids[handle]] += 1
        self.told[how] += 1
        self._room.release()


def _reason(error: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    return next((info.reason for detail in error.details if detail.Unpack(info)), str(error.code))


async def test_a_storm_of_requests_on_few_streams(attacked: Victim, size: Size, figures: Figures) -> None:
    told: Counter[str] = Counter()
    with storm(attacked, size, figures, "multiplex storm", told):
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            # One of them is hardly read.
            slownesses = [size.slowness_s, *[0.0] * (NUM_STREAMS - 1)]
            streams = [
                Stream(stub.MultiplexGenerate(), number, slowness_s) for number, slowness_s in enumerate(slownesses)
            ]
            await together(stream.play(size.multiplexed) for stream in streams)
        for stream in streams:
            told.update(stream.told)
            assert stream.ends == Counter(map(stream.request_id, range(size.multiplexed))), "an end for each, and one"
    assert told.keys() <= {"OK", "CANCELLED"}, told
    assert told["OK"] and told["CANCELLED"]
