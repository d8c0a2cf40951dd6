"""The bridge within one program."""

from __future__ import annotations

import asyncio

import pytest

from photon_grpc.bridge.local import LocalClient
from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.frames import Abort, Facts, Reply, Watch
from photon_grpc.core.stats import Load
from photon_grpc.errors import EngineFailure
from tests.kv_plans import kv_plan

FACTS = Facts(4096, 4096, kv_plan(16), 100, 64, 2048, 1024, 1 << 20, "cpu", "float32")


async def test_frames_go_down_to_a_thread_and_up_to_the_loop():
    client = LocalClient(asyncio.get_running_loop(), FACTS)
    host = client.host()
    up: asyncio.Queue = asyncio.Queue()
    client.listen(up.put_nowait, lambda: up.put_nowait("lost"))
    assert host.drain(0.0) == []
    assert host.drain(0.001) == []
    waiting = asyncio.create_task(asyncio.to_thread(host.drain, None))
    await asyncio.sleep(0.01)
    client.send(Abort((1,)))
    assert await waiting == [(0, Abort((1,)))]
    client.send(Abort((2,)))
    client.send(Abort((3,)))
    assert host.drain(0.0) == [(0, Abort((2,))), (0, Abort((3,)))]
    client.send(Watch(is_on=True))
    assert host.drain(0.0) == [(0, Watch(is_on=True))]
    picture = EnginePicture(0.5, (), 0, (), Load())
    for frame in (Reply(1), picture):
        await asyncio.to_thread(host.send, 0, frame)
        assert await up.get() == frame


async def test_an_ended_engine_is_reported_once_and_takes_nothing_more():
    client = LocalClient(asyncio.get_running_loop(), FACTS)
    host = client.host()
    losses: list[int] = []
    client.listen(lambda frame: None, lambda: losses.append(1))
    host.close()
    with pytest.raises(EOFError):
        host.drain(None)
    host.lost()
    host.lost()
    await asyncio.sleep(0.01)
    assert losses == [1]
    assert client.facts is None
    with pytest.raises(EngineFailure):
        client.send(Abort((1,)))


async def test_a_broadcast_reaches_the_only_front_end():
    client = LocalClient(asyncio.get_running_loop(), FACTS)
    host = client.host()
    heard: list = []
    client.listen(heard.append, lambda: None)
    host.broadcast(Load(total_blocks=7))
    await asyncio.sleep(0.01)
    assert heard == [Load(total_blocks=7)]
