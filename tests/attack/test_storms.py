"""Callers that come in crowds and leave at the wrong moment. Afterwards nothing is owned, nothing is open, and
everybody is served."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import time
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack import http2
from tests.attack.answers import Answer, answer, strangers, tally, together
from tests.attack.figures import Figures
from tests.attack.http2 import DATA, END_HEADERS, HEADERS, Connection, connected, frame
from tests.attack.neighbour import neighbour
from tests.attack.size import Size
from tests.attack.victim import Belongings, Victim

STREAM_GENERATE = "/photon_grpc.v1.InferenceService/StreamGenerate"
#: More than there are slots.
_IN_FLIGHT = 24
#: Growth that is none: caches of the allocator, pools of threads.
_SPARE_MIB = 64.0


@contextlib.contextmanager
def storm(attacked: Victim, size: Size, figures: Figures, name: str, told: Counter[str]) -> Iterator[None]:
    """What holds around every storm; its row in the table, where `told` is what the block has counted."""
    belongings = Belongings(attacked)
    with attacked.unharmed(), neighbour(attacked.address) as beside:
        yield
    ended_s = time.monotonic()
    attacked.owns_nothing()
    recovery = f"{time.monotonic() - ended_s:.1f}"
    belongings.return_to_what_they_were()
    left_behind = belongings.told()
    figures.add(name, f"{told.total():,}", told, neighbour=beside.told(), recovery=recovery, left_behind=left_behind)
    assert belongings.grown_mib() < _SPARE_MIB, left_behind
    # It waits its turn among those who came before; who is well does not.
    assert beside.failed == []
    assert max(beside.health_s) < size.neighbour_s


def request(draw: random.Random) -> pb.GenerateRequest:
    """Of a prompt that needs several steps of prefill, or one; it goes on until somebody ends it or 60 tokens are
    there."""
    ids = [draw.randrange(4, 4000) for _ in range(draw.choice((1, 20, 90)))]
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    asked.stop.max_tokens = draw.choice((1, 2, 20, 60))
    asked.stop.ignore_eos = True
    asked.sampling.num_outputs = draw.choice((1, 1, 3))
    asked.output.text = draw.random() < 0.5
    return asked


def test_connections_that_vanish(attacked: Victim, size: Size, figures: Figures) -> None:
    draw = random.Random(1)
    told: Counter[str] = Counter()
    with storm(attacked, size, figures, "connections that vanish", told):
        for number in range(size.vanishing):
            data = http2.grpc_message(request(draw).SerializeToString())
            connection = Connection(attacked.address)
            stage = number % len(_STAGES)
            connection.send(b"".join(_STAGES[stage](data)))
            if number % 3 == 0:
                time.sleep(draw.random() / 50)
            connection.vanish()
            told[f"stage {stage}"] += 1


def _headers() -> bytes:
    return frame(HEADERS, END_HEADERS, 1, http2.header_block(STREAM_GENERATE))


#: What was said before the connection is reset.
_STAGES = (
    lambda data: (),
    lambda data: (_headers(),),
    lambda data: (_headers(), frame(DATA, 0, 1, data[: len(data) // 2])),
    lambda data: (_headers(), frame(DATA, 0, 1, data)),
    lambda data: (_headers(), frame(DATA, http2.END_STREAM, 1, data)),
)


async def test_cancels_in_every_phase(attacked: Victim, size: Size, figures: Figures) -> None:
    draw = random.Random(2)
    room = asyncio.Semaphore(_IN_FLIGHT)
    told: Counter[str] = Counter()

    async def one(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        async with room:
            told[await _cancelled(stub.StreamGenerate(request(draw)), draw)] += 1

    with storm(attacked, size, figures, "cancels", told):
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await together(one(stub) for _ in range(size.cancels))
    assert len(told) >= 3


async def _cancelled(call: grpc.aio.UnaryStreamCall, draw: random.Random) -> str:
    """After a while, after some messages, or with the last token; how far it had come."""
    patience = draw.choice((0, 0, 1, 2, 10, 10_000))
    if patience == 0:
        await asyncio.sleep(draw.random() / 10)
    for number in range(patience):
        message = await call.read()
        if message is grpc.aio.EOF:
            return "ended before"
        if any(delta.HasField("finish") for delta in message.deltas):
            call.cancel()
            return "with the last token"
        if number + 1 == patience:
            call.cancel()
            return "while it spoke"
    call.cancel()
    return "before any message"


async def test_deadlines_that_cannot_be_met(attacked: Victim, size: Size, figures: Figures) -> None:
    draw = random.Random(3)
    room = asyncio.Semaphore(_IN_FLIGHT)
    told: Counter[str] = Counter()
    found: list[Answer] = []

    async def one(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        asked = request(draw)
        field, call_s = draw.choice(((None, 0.08), (0.08, 30.0), (0.05, 0.08)))
        if field is not None:
            asked.scheduling.timeout.FromMicroseconds(int(draw.random() * field * 1e6))
        async with room:
            call = stub.StreamGenerate(asked, timeout=30.0 if call_s == 30.0 else draw.random() * call_s)
            found.append(await answer(call))

    with storm(attacked, size, figures, "deadlines", told):
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await together(one(stub) for _ in range(size.deadlines))
        told.update(tally(found))
    assert strangers(found, "DEADLINE_EXCEEDED") == []


def test_streams_that_nobody_reads(attacked: Victim, size: Size, figures: Figures) -> None:
    """The server may send them nothing: what they are told waits, and nobody else does."""
    draw = random.Random(4)
    told: Counter[str] = Counter()
    with storm(attacked, size, figures, "unread streams", told), contextlib.ExitStack() as readers:
        for _ in range(size.unread):
            connection = readers.enter_context(connected(attacked.address, window=0))
            connection.call(1, STREAM_GENERATE, http2.grpc_message(request(draw).SerializeToString()))
            told["begun"] += 1
        time.sleep(1)


@pytest.mark.long_attack
def test_a_client_that_fell_silent_is_let_go(attacked: Victim, figures: Figures) -> None:
    """It acknowledges no PING, as one whose network is gone: the connection is closed by keepalive, within 20 s."""
    with attacked.unharmed(), connected(attacked.address, limit_s=30, window=0) as connection:
        connection.send(_headers() + frame(DATA, 0, 1, struct.pack(">BI", 0, 100)))
        begun_s = time.monotonic()
        for _ in connection.frames(is_polite=False):
            pass
        seconds = time.monotonic() - begun_s
    figures.add("a silent client", "1", "closed", recovery=f"{seconds:.1f}")
    assert seconds < 25
