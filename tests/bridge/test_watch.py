"""From an engine's steps to the watchers of a front end: over a socket, and over the life of an engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from photon_grpc.bridge.client import BridgeClient
from photon_grpc.bridge.codec import max_frame_bytes
from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.bridge.host import BridgeHost
from photon_grpc.core.ask import StopAsk
from photon_grpc.core.engine_picture import EnginePicture, Mark
from photon_grpc.core.ports import EnginePorts
from photon_grpc.engine.engine import Engine
from tests.engine.harness import Harness, Setting
from tests.frontend.fake_engine import FakeLink, ask, frontend

MAX_BYTES = max_frame_bytes(1 << 20)


@asynccontextmanager
async def engine(client: BridgeClient) -> AsyncIterator[Engine]:
    """An engine in a thread, which ends with its socket."""
    ours, theirs = socket.socketpair()
    harness, host = Harness(Setting(max_num_batched_tokens=8)), BridgeHost(None, max_frame_bytes=MAX_BYTES)
    engine = Engine(harness.scheduler, harness.runner, EnginePorts(host, host, NoHeartbeat()), harness.facts)
    host.connect(theirs)
    host.announce(harness.facts)
    running = asyncio.create_task(asyncio.to_thread(engine.run))
    await client.connect(ours)
    yield engine
    theirs.shutdown(socket.SHUT_RDWR)
    await running
    host.close()


async def test_a_watcher_follows_requests_and_engines() -> None:
    client = BridgeClient(max_frame_bytes=MAX_BYTES)
    with frontend(link=cast(FakeLink, client)) as (front, _), front.watch() as watcher:
        for _ in range(2):
            async with engine(client) as running:
                first = await anext(watcher)
                assert (first.lanes, first.load.total_blocks) == ((), 64)
                stream = await front.stream(ask(tuple(range(20)), stop=StopAsk(max_tokens=4)))
                seen: list[EnginePicture] = []
                while not any(lane.marks & Mark.ENDED for picture in seen for lane in picture.lanes):
                    seen.append(await anext(watcher))
                lanes = [lane for picture in seen for lane in picture.lanes]
                assert (sum(lane.prefilled for lane in lanes), sum(lane.decoded for lane in lanes)) == (20, 3)
                stream.close()
                assert running._pictures.is_watched
            # The engine has heard that its front end is gone.
            assert not running._pictures.is_watched
