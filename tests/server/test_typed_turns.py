"""Callers' message types are read in turns, after all immediate checks, and are dropped with their calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from photon_grpc.config.flags import ServerConfig
from photon_grpc.errors import QueueFull, QuotaExceeded
from photon_grpc.server.calls.call import Call
from photon_grpc.server.multiplex import MultiplexCall
from photon_grpc.server.server import Server
from photon_grpc.server.typed import message_type
from photon_grpc.server.typed.message_type import MessageType
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1.inference_pb2_grpc import InferenceServiceStub
from tests.server.described import file, message, serialized
from tests.server.fake_frontend import FakeFrontend, serving


class Readers:
    """A reader of types that waits for the test, and records which have begun and how many requests have arrived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.num_requests = 0
        self._turns = threading.Semaphore(0)
        self._read, self._origin = message_type.read_message_type, Call.origin
        monkeypatch.setattr(message_type, "read_message_type", self._wait_and_read)
        monkeypatch.setattr(Call, "origin", lambda *call: self._count(*call))
        self._close = MultiplexCall.close
        monkeypatch.setattr(MultiplexCall, "close", lambda call: self._closed(call))
        self.is_closed = asyncio.Event()

    def let_go(self, count: int) -> None:
        self._turns.release(count)

    async def until_requests(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.num_requests < count or not self.begun:  # noqa: ASYNC110  # what gRPC and a thread do
                await asyncio.sleep(0.001)

    def _wait_and_read(self, files: bytes, name: str) -> MessageType:
        self.begun.append(name)
        if not self._turns.acquire(timeout=30):
            raise TimeoutError
        return self._read(files, name)

    def _closed(self, call: MultiplexCall) -> None:
        self._close(call)
        self.is_closed.set()

    def _count(self, *call: Any) -> Any:
        self.num_requests += 1
        return self._origin(*call)


def typed(name: str) -> pb.GenerateRequest:
    described = file()
    message(described, name, "a: int32")
    typed = pb.StructuredOutput.Protobuf(file_descriptor_set=serialized(described), message_type=f"acme.{name}")
    return pb.GenerateRequest(request_id=name, text="x", structured_output=pb.StructuredOutput(protobuf=typed))


@asynccontextmanager
async def two_callers(tmp_path: Path) -> AsyncIterator[tuple[InferenceServiceStub, InferenceServiceStub]]:
    """Yield two callers, one from 127.0.0.1 and one over a Unix socket."""
    server = Server(FakeFrontend(), config=ServerConfig())  # type: ignore[arg-type]
    addresses = await server.start(("127.0.0.1:0", f"unix:{tmp_path}/s"), reuse_port=False)
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    try:
        yield InferenceServiceStub(channels[0]), InferenceServiceStub(channels[1])
    finally:
        for channel in channels:
            await channel.close()
        await server.drain_and_stop(0)


async def test_a_type_does_not_wait_for_those_of_another_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readers = Readers(monkeypatch)
    async with two_callers(tmp_path) as (many, single):
        stream = many.MultiplexGenerate()
        for number in range(300):
            await stream.write(pb.MultiplexGenerateRequest(generate=typed(f"A{number}")))
        await readers.until_requests(300)
        call = single.Generate(typed("B"))
        await readers.until_requests(301)
        readers.let_go(1000)
        await call
        assert readers.begun.index("acme.B") <= 2
        stream.cancel()


async def test_types_that_wait_leave_with_their_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readers = Readers(monkeypatch)
    async with two_callers(tmp_path) as (many, single):
        stream = many.MultiplexGenerate()
        for number in range(50):
            await stream.write(pb.MultiplexGenerateRequest(generate=typed(f"A{number}")))
        await readers.until_requests(50)
        stream.cancel()
        await readers.is_closed.wait()
        await asyncio.sleep(0)
        readers.let_go(1000)
        await single.Generate(typed("B"))
        assert len(readers.begun) <= 2


async def test_no_type_is_read_of_a_request_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    readers, frontend = Readers(monkeypatch), FakeFrontend()
    readers.let_go(100)
    async with serving(frontend) as address, grpc.aio.insecure_channel(address) as channel:
        frontend.refusals = [QueueFull("full", retry_after_s=1.0), QuotaExceeded("used up")]
        for number in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await InferenceServiceStub(channel).Generate(typed(f"A{number}"))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not readers.begun
