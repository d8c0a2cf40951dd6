"""An operator's commands and the engine's replies, which come in any order or never."""

from __future__ import annotations

import asyncio

import pytest

from photon_grpc.core.frames import Control, Reply
from photon_grpc.errors import EngineRestarting
from tests.frontend.fake_engine import FakeLink, frontend


async def test_every_command_gets_its_own_reply() -> None:
    with frontend() as (front, link):
        first = asyncio.create_task(front.control("reset_prefix_cache"))
        second = asyncio.create_task(front.control("abort_requests", ("a",)))
        third = asyncio.create_task(front.control("reset_prefix_cache"))
        await asyncio.sleep(0)
        assert link.sent == [
            Control(1, "reset_prefix_cache"),
            Control(2, "abort_requests", ("a",)),
            Control(3, "reset_prefix_cache"),
        ]
        third.cancel()
        for reply in (Reply(3), Reply(2, 1, ("a",)), Reply(9), Reply(1, 5), Reply(1, 6)):
            link.on_frame(reply)
        assert [await first, await second] == [Reply(1, 5), Reply(2, 1, ("a",))]
        assert not front._controls._waiting


async def test_commands_end_with_their_engine() -> None:
    with frontend() as (front, link):
        order = asyncio.create_task(front.control("reset_prefix_cache"))
        await asyncio.sleep(0)
        link.lose()
        with pytest.raises(EngineRestarting):
            await order
        with pytest.raises(EngineRestarting):
            await front.control("reset_prefix_cache")
        with pytest.raises(EngineRestarting):
            _ = front.facts
        assert not front._controls._waiting


def test_facts_are_available_while_draining() -> None:
    async def told() -> None:
        with frontend(link=FakeLink()) as (front, link):
            await front.drain(0)
            assert front.facts is link.facts

    asyncio.run(told())
