"""Every way in which a call or a connection can end, in every phase of a request.

The caller gets the reason, and nothing of the request remains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.frames import Failed
from photon_grpc.errors import KVCapacity
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.server.server import Server
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.fake_engine import FakeLink, done, served
from tests.server.fake_frontend import ASK, until

TOKEN = 70
#: The second and third only where a machine is too busy to reach the phase before the deadline.
DEADLINES_S = (0.4, 8.0, 100.0)
PHASES = ("encoding", "waiting", "streaming")
METHODS = ("Generate", "StreamGenerate")


class HeldEncoder(ThreadEncoder):
    """An encoder that waits for permission."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_begin = asyncio.Event()
        self.num_waiting = 0

    async def encode(self, *args: Any) -> Any:
        self.num_waiting += 1
        try:
            await self.may_begin.wait()
        finally:
            self.num_waiting -= 1
        return await super().encode(*args)


class EndedBefore(Exception):
    """The call ended before it reached its phase."""


class Service:
    """A server with a real front end and an engine that a test scripts."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        model = served()
        self.link = FakeLink()
        self.encoder = HeldEncoder(model, pool)
        self.frontend = Frontend(link=self.link, model=model, encoder=self.encoder)
        self.server = Server(self.frontend, config=ServerConfig())
        self.address = ""
        self.channel: grpc.aio.Channel

    async def call_in(self, phase: str, method: str, timeout_s: float = 240.0) -> asyncio.Task[Any]:
        """Bring a call to that phase, and return the task of its caller. Raise EndedBefore."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        call = getattr(stub, method)(ASK, timeout=timeout_s)
        begun = asyncio.Event()
        caller = asyncio.create_task(outcome(call, begun))
        await reached(lambda: self.encoder.num_waiting == 1, caller)
        if phase == "encoding":
            return caller
        self.encoder.may_begin.set()
        await reached(lambda: len(self.link.adds) == 1, caller)
        if phase == "streaming":
            self.link.step((1, TOKEN))
            if method == "StreamGenerate":
                await reached(begun.is_set, caller)
        return caller

    async def is_at_rest(self) -> None:
        await until(lambda: not self.frontend.num_streams and not self.encoder.num_waiting)
        assert not self.frontend._streams._running


async def reached(is_reached: Callable[[], bool], caller: asyncio.Task[Any]) -> None:
    await until(lambda: is_reached() or caller.done(), 120)
    if not is_reached():
        raise EndedBefore


async def outcome(call: Any, begun: asyncio.Event) -> tuple[grpc.StatusCode, str]:
    """Return the status and text of a call; the first message of a stream sets `begun`."""
    if isinstance(call, grpc.aio.UnaryStreamCall):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                begun.set()
    return await asyncio.wait_for(call.code(), 120), await call.details()


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Service]:
    with ThreadPoolExecutor(1) as pool:
        service = Service(pool)
        (service.address,) = await service.server.start(("127.0.0.1:0",), reuse_port=False)
        async with grpc.aio.insecure_channel(service.address) as service.channel:
            yield service
        service.encoder.may_begin.set()
        await service.server.drain_and_stop(0)
        await service.is_at_rest()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running() as service:
        yield service


def aborted_in(phase: str) -> list[int]:
    """Return the handles that the engine must abort: none if it never got the request."""
    return [] if phase.endswith("encoding") else [1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancelled_call(service: Service, phase: str, method: str) -> None:
    caller = await service.call_in(phase, method)
    caller.cancel()
    await service.channel.close()
    await service.is_at_rest()
    assert service.link.aborted == aborted_in(phase)
    assert bool(service.link.adds) == bool(aborted_in(phase))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_call_whose_deadline_passes(phase: str, method: str) -> None:
    for timeout_s in DEADLINES_S:
        with contextlib.suppress(EndedBefore):
            async with running() as service:
                caller = await service.call_in(phase, method, timeout_s)
                assert (await caller)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
                await service.is_at_rest()
                assert service.link.aborted == aborted_in(phase)
                return
    pytest.fail("no call reached its phase before its deadline")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_call_whose_connection_is_lost(service: Service, phase: str, method: str) -> None:
    """Cut the connection between the two silently, as a network may."""
    async with relay(service.address) as (address, cut):
        await service.channel.close()
        service.channel = grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        caller = await service.call_in(phase, method)
        cut()
        assert (await caller)[0] is grpc.StatusCode.UNAVAILABLE
    await service.is_at_rest()
    assert service.link.aborted == aborted_in(phase)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_call_whose_engine_is_lost(service: Service, phase: str, method: str) -> None:
    caller = await service.call_in(phase, method)
    service.link.lose()
    service.encoder.may_begin.set()
    code, text = await caller
    has_seen_output = phase == "streaming" and method == "StreamGenerate"
    assert code is grpc.StatusCode.UNAVAILABLE
    assert ("after output began" in text) is has_seen_output
    assert service.link.aborted == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_call_at_the_limit_of_a_drain(service: Service, phase: str, method: str) -> None:
    caller = await service.call_in(phase, method)
    stopping = asyncio.create_task(service.server.drain_and_stop(0.2))
    if phase == "encoding":
        await until(lambda: service.frontend.state.value == "draining")
        service.encoder.may_begin.set()
    code, text = await caller
    assert (code, "draining" in text) == (grpc.StatusCode.UNAVAILABLE, True)
    await stopping
    assert service.link.aborted == aborted_in(phase)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", PHASES[1:])
async def test_a_call_that_the_engine_fails(service: Service, phase: str, method: str) -> None:
    caller = await service.call_in(phase, method)
    service.link.step(failed=(Failed.of(1, KVCapacity("too many blocks", needed=9, limit=6)),))
    assert await caller == (grpc.StatusCode.FAILED_PRECONDITION, "too many blocks")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", PHASES[1:])
async def test_a_call_that_finishes_within_a_drain(service: Service, phase: str, method: str) -> None:
    caller = await service.call_in(phase, method)
    stopping = asyncio.create_task(service.server.drain_and_stop(30))
    await until(lambda: service.frontend.state.value == "draining")
    service.link.step((1, TOKEN), finished=(done(1),))
    assert (await caller)[0] is grpc.StatusCode.OK
    await stopping


async def test_an_idle_connection_is_closed_by_a_stop(service: Service) -> None:
    await service.channel.channel_ready()
    await service.server.drain_and_stop(0)
    await until(lambda: service.channel.get_state() is not grpc.ChannelConnectivity.READY)
    host, _, port = service.address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64]
)
async def test_a_connection_that_speaks_something_else(service: Service, said: bytes) -> None:
    host, _, port = service.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    if not said:
        writer.write_eof()
    while await asyncio.wait_for(reader.read(65536), 120):
        pass
    writer.close()
    caller = await service.call_in("waiting", "Generate")
    service.link.step((1, TOKEN), finished=(done(1),))
    assert (await caller)[0] is grpc.StatusCode.OK


class relay:
    """A proxy that forwards everything to `address`; `cut` resets both sides."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> tuple[str, Callable[[], None]]:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}", self._cut

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self._cut()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, far_writer]
        self._tasks += [
            asyncio.create_task(pass_on(reader, far_writer)),
            asyncio.create_task(pass_on(far_reader, writer)),
        ]

    def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        self._server.close()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
