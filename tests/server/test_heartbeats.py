"""Heartbeats before the first token, over a real socket, with a real front end and an engine that a test scripts.

An interval of 1 s, the shortest that is accepted, lasts 20 ms here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from photon_grpc.client import Client
from photon_grpc.core.fault import Fault
from photon_grpc.core.frames import Abort, Failed
from photon_grpc.errors import DeadlinePassed, NumericFailure, PhotonError
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.server import heartbeats, inference
from photon_grpc.server.heartbeats import Heartbeats, begun
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.fake_engine import FakeLink, ask, done, frontend, served
from tests.server.failing import info_of
from tests.server.fake_frontend import serving, until
from tests.server.test_multiplex import HeldEncoder

TOKEN = 70
FASTER = 50
MANY = 3


class Service:
    def __init__(self, link: FakeLink, encoder: HeldEncoder, front: Frontend) -> None:
        self.link = link
        self.encoder = encoder
        self.frontend = front
        self.stub: inference_pb2_grpc.InferenceServiceStub
        self.address = ""

    async def is_at_rest(self) -> None:
        await until(lambda: not self.frontend.num_streams and not self.encoder.num_waiting)
        assert not self.frontend._streams._running


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    class Hurried(Heartbeats):
        def __init__(self, interval_s: float, on_due: Callable[[], None]) -> None:
            super().__init__(interval_s / FASTER, on_due)

    def hurried(admission: Any, interval_s: float, send: Any) -> Any:
        return begun(admission, interval_s / FASTER, send)

    monkeypatch.setattr(heartbeats, "Heartbeats", Hurried)
    monkeypatch.setattr(inference, "begun", hurried)
    with ThreadPoolExecutor(1) as pool:
        link, encoder = FakeLink(), HeldEncoder(served(), pool)
        service = Service(link, encoder, Frontend(link=link, model=served(), encoder=encoder))
        async with serving(service.frontend) as service.address:  # type: ignore[arg-type]
            async with grpc.aio.insecure_channel(service.address) as channel:
                service.stub = inference_pb2_grpc.InferenceServiceStub(channel)
                yield service
            await service.is_at_rest()


def request(text: str = "hi", interval_s: float = 1.0, **stream: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(request_id="r", text=text, stream=pb.StreamOptions(**stream))
    if interval_s:
        made.stream.heartbeat_interval.FromNanoseconds(round(interval_s * 1e9))
    return made


class Reader:
    """One request, on a stream of its own or on a shared one, and the messages received so far."""

    def __init__(self, service: Service, is_shared: bool, request: pb.GenerateRequest) -> None:
        self._stub = service.stub
        self._is_shared = is_shared
        self._request = request
        self.items: list[pb.MultiplexItem] = []
        self.messages: list[pb.StreamGenerateResponse] = []
        self.reason = ""
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            await (self._read_shared() if self._is_shared else self._read_own())
        except grpc.aio.AioRpcError as failure:
            self.reason = info_of(failure).reason

    async def _read_own(self) -> None:
        async for message in self._stub.StreamGenerate(self._request):
            self.messages.append(message)

    async def _read_shared(self) -> None:
        call = self._stub.MultiplexGenerate(iter([pb.MultiplexGenerateRequest(generate=self._request)]))
        async for frame in call:
            self.items += frame.items
            for item in frame.items:
                if item.HasField("error"):
                    self.reason = info_of_status(item.error)
                else:
                    self.messages.append(item.response)


def info_of_status(status: Any) -> str:
    found = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(found)
    return found.reason


def is_heartbeat(message: pb.StreamGenerateResponse) -> bool:
    return message == pb.StreamGenerateResponse(sequence=message.sequence)


@pytest.fixture(params=["own", "shared"])
def is_shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "shared")


async def test_a_request_that_waits_has_heartbeats_until_its_first_token(service: Service, is_shared: bool) -> None:
    reader = Reader(service, is_shared, request("held", min_interval={"seconds": 3600}))
    await until(lambda: len(reader.messages) >= MANY)  # while its prompt waits to be encoded
    assert service.encoder.num_waiting == 1 and not service.link.sent
    waiting_s = time.time()
    service.encoder.may_begin.set()
    await service.link.added(1)
    before = len(reader.messages)
    await until(lambda: len(reader.messages) >= before + MANY)  # while the engine computes its prompt
    assert len(service.link.sent) == 1, "no heartbeat reaches the engine"
    assert all(map(is_heartbeat, reader.messages))
    service.link.step((1, TOKEN))
    await until(lambda: reader.messages[-1].HasField("start"))
    before = len(reader.messages)
    await asyncio.sleep(MANY / FASTER)
    assert len(reader.messages) == before, "none after the first token"
    service.link.step((1, TOKEN), finished=(done(1),))
    await reader.task
    *beats, first, last = reader.messages
    assert all(map(is_heartbeat, beats))
    assert [message.sequence for message in reader.messages] == list(range(1, len(reader.messages) + 1))
    assert 0 < first.start.create_time.ToNanoseconds() / 1e9 < waiting_s, "it was created when it arrived"
    assert first.start.request_id == "r" and first.deltas[0].text and not last.HasField("start")
    assert last.usage.output_tokens == last.deltas[0].usage.output_tokens == 2
    if is_shared:
        assert {item.handle for item in reader.items} == {1}
        assert [item.request_id for item in reader.items] == ["r", *[""] * (len(reader.items) - 1)]


async def test_a_request_without_the_option_has_none(service: Service, is_shared: bool) -> None:
    reader = Reader(service, is_shared, request(interval_s=0.0))
    await service.link.added(1)
    await asyncio.sleep(MANY / FASTER)
    assert not reader.messages
    service.link.step((1, TOKEN), finished=(done(1),))
    await reader.task
    assert [message.sequence for message in reader.messages] == [1]


async def test_a_failure_after_heartbeats_has_its_status(service: Service, is_shared: bool) -> None:
    reader = Reader(service, is_shared, request())
    await until(lambda: len(reader.messages) >= 1)
    service.link.step(failed=(Failed(1, Fault.of(NumericFailure("no number"))),))
    await reader.task
    assert reader.reason == "NUMERIC_FAILURE" and all(map(is_heartbeat, reader.messages))


async def test_a_prompt_that_is_refused_after_heartbeats_has_its_status(service: Service, is_shared: bool) -> None:
    service.encoder.held.add("x" * 500)
    reader = Reader(service, is_shared, request("x" * 500))
    await until(lambda: len(reader.messages) >= 1)
    service.encoder.may_begin.set()
    await reader.task
    assert reader.reason == "PROMPT_TOO_LONG" and not service.link.sent


@pytest.mark.parametrize("text", ["held", "hi"])
async def test_leaving_ends_what_waits(service: Service, is_shared: bool, text: str) -> None:
    reader = Reader(service, is_shared, request(text))
    await until(lambda: len(reader.messages) >= 1)
    reader.task.cancel()
    await service.is_at_rest()
    assert [type(frame) for frame in service.link.sent[1:]] == ([Abort] if text == "hi" else [])


async def test_a_cancelled_request_of_many_has_no_more(service: Service) -> None:
    call = service.stub.MultiplexGenerate()
    await call.write(pb.MultiplexGenerateRequest(generate=request("held")))
    first = await call.read()
    assert is_heartbeat(first.items[0].response)
    await call.write(pb.MultiplexGenerateRequest(cancel=pb.MultiplexGenerateRequest.Cancel(request_id="r")))
    while not (frame := await call.read()).items[0].HasField("error"):
        pass
    assert frame.items[0].error.code == grpc.StatusCode.CANCELLED.value[0]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("interval_s", [0.999, 0.0001])
async def test_a_shorter_interval_is_refused_before_anything_is_sent(
    service: Service, is_shared: bool, interval_s: float
) -> None:
    reader = Reader(service, is_shared, request("held", interval_s))
    await reader.task
    assert reader.reason == "INVALID_REQUEST" and not reader.messages


async def test_the_client_shows_no_heartbeats(service: Service) -> None:
    async def answer(handle: int) -> None:
        await service.link.added(handle)
        await asyncio.sleep(MANY / FASTER)
        service.link.step((handle, TOKEN), finished=(done(handle),))

    async with Client(service.address) as client, client.multiplex() as many:
        whole, _ = await asyncio.gather(many.generate("hi", heartbeat_interval=1), answer(1))
        assert whole.text and whole.request_id and whole.outputs[0].usage.output_tokens == 1
        stream = client.stream("hi", heartbeat_interval=1)
        first, _ = await asyncio.gather(anext(stream), answer(2))
        assert first.text == whole.text and stream.start is not None


# --- without a call --------------------------------------------------------------------------------------------------


async def test_a_stream_that_comes_as_its_call_ends_is_closed() -> None:
    with frontend() as (front, link):
        admitted = asyncio.Event()

        async def admission() -> Any:
            stream = await front.stream(ask())
            admitted.set()
            return stream

        async def beat() -> None:
            await admitted.wait()
            raise DeadlinePassed("the reader took no message")

        with pytest.raises(DeadlinePassed):
            await begun(admission(), 0.0, beat)
        assert link.aborted == [1] and not front.num_streams


async def test_a_reader_that_stalls_ends_a_stream_that_waits() -> None:
    with frontend() as (front, link):

        async def beat() -> None:
            if front.num_streams:
                raise DeadlinePassed("the reader took no message")

        with pytest.raises(PhotonError):
            await begun(front.stream(ask()), 0.001, beat)
        assert link.aborted == [1] and not front.num_streams
