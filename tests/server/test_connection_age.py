"""The age of a connection: calls move to a new one, and none is cut off within the grace."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from photon_grpc.config.flags import ServerConfig
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ConfigError
from photon_grpc.v1 import inference_pb2_grpc
from tests.server.fake_frontend import ASK, HELLO, FakeFrontend, for_ever, serving, until
from tests.server.test_ends import relay

#: Options of a client that never retries.
OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


class CountingRelay(relay):
    num_connections = 0

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        await super()._join(reader, writer)


@pytest.mark.parametrize("more", [{}, {"max_connection_age_grace": 60.0}])
async def test_a_stream_outlives_the_age_and_new_calls_take_another_connection(more: dict[str, Any]) -> None:
    frontend, is_over = FakeFrontend(), asyncio.Event()
    async with serving(frontend, config=ServerConfig(max_connection_age=1.0, **more)) as direct:
        counting = CountingRelay(direct)
        async with counting as (address, _), grpc.aio.insecure_channel(address, OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            frontend.script = (HELLO[0], is_over.wait, *HELLO[1:])
            stream = stub.StreamGenerate(ASK)
            texts = [(await stream.read()).deltas[0].text]
            frontend.script = HELLO
            # Lasts two ages, and no call fails. The limit only ends a test that hangs.
            async with asyncio.timeout(60):
                while counting.num_connections < 3:
                    await stub.Generate(ASK)
                    await asyncio.sleep(0.01)
            assert not frontend.streams[0].closed.is_set()
            is_over.set()
            while (message := await stream.read()) is not grpc.aio.EOF:
                texts.append(message.deltas[0].text)
            assert texts == ["hel", "lo", "!"] and await stream.code() is grpc.StatusCode.OK


async def test_calls_still_running_after_the_grace_end_unavailable() -> None:
    frontend = FakeFrontend()
    config = ServerConfig(max_connection_age=1.0, max_connection_age_grace=1.0)
    async with serving(frontend, config=config) as address, grpc.aio.insecure_channel(address, OPTIONS) as channel:
        frontend.script = (HELLO[0], for_ever)
        stream = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(ASK)
        await stream.read()
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(stream.read(), 120)
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        await until(frontend.streams[0].closed.is_set)


def test_a_grace_without_an_age_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-connection-age"):
        resolve({"max_connection_age_grace": 60}, {})
    assert (
        resolve({"max_connection_age": 60, "max_connection_age_grace": 60}, {}).config.server.max_connection_age == 60
    )
