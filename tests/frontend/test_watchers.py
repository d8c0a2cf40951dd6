"""Watchers of one front end share what the engine sends, and outlive the engine."""

from __future__ import annotations

import asyncio

import pytest

from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.frames import Watch
from photon_grpc.core.stats import Load
from photon_grpc.errors import EngineFailure, QueueFull
from photon_grpc.frontend.watchers import MAX_WATCHERS
from tests.frontend.fake_engine import FACTS, FakeLink, frontend

ON, OFF = Watch(is_on=True), Watch(is_on=False)


def picture(number: int) -> EnginePicture:
    return EnginePicture(float(number), (), 0, (), Load())


async def test_the_engine_hears_of_the_first_and_the_last_watcher() -> None:
    with frontend() as (front, link):
        first = front.watch()
        with front.watch() as second:
            assert link.sent == [ON]
            for watcher in (first, second):
                task = asyncio.create_task(anext(watcher))
                await asyncio.sleep(0)
                link.on_frame(picture(1))
                assert await task == picture(1)
        assert link.sent == [ON]
        first.close()
        first.close()
        assert link.sent == [ON, OFF]
        front.watch()  # forgotten at once
        link.on_frame(picture(2))
        assert link.sent == [ON, OFF, ON, OFF]


async def test_a_slow_watcher_gets_only_the_newest_picture() -> None:
    with frontend() as (front, link), front.watch() as slow:
        for number in range(5):
            link.on_frame(picture(number))
        assert await anext(slow) == picture(4)
        waiting = asyncio.create_task(anext(slow))
        await asyncio.sleep(0)
        assert not waiting.done()
        link.on_frame(picture(5))
        assert await waiting == picture(5)


async def test_a_later_watcher_sees_the_newest_picture_at_once() -> None:
    with frontend() as (front, link), front.watch():
        link.on_frame(picture(1))
        with front.watch() as later:
            assert await anext(later) == picture(1)
    with frontend(link=link) as (front, link), front.watch() as fresh:
        waiting = asyncio.create_task(anext(fresh))
        await asyncio.sleep(0)
        assert not waiting.done()
        fresh.close()
        with pytest.raises(StopAsyncIteration):
            await waiting


async def test_closing_ends_the_iteration() -> None:
    with frontend() as (front, link), front.watch() as watcher:
        seen = []
        link.on_frame(picture(1))
        async for each in watcher:
            seen.append(each)
            watcher.close()
        assert seen == [picture(1)]


async def test_watching_goes_on_with_the_next_engine() -> None:
    with frontend() as (front, link):
        watcher = front.watch()
        link.on_frame(picture(1))
        assert await anext(watcher) == picture(1)
        link.on_frame(picture(1))
        link.lose()
        waiting = asyncio.create_task(anext(watcher))
        await asyncio.sleep(0)
        assert not waiting.done(), "it shows the engine that is gone"
        with front.watch() as other:
            assert link.sent == [ON]
            link.facts = FACTS
            link.on_frame(FACTS)
            assert link.sent == [ON, ON]
            link.on_frame(picture(2))
            assert await waiting == await anext(other) == picture(2)
        link.lose()
        watcher.close()
        link.facts = FACTS
        link.on_frame(FACTS)
        assert link.sent == [ON, ON]


async def test_an_engine_that_is_lost_right_after_a_picture_does_not_end_the_iteration() -> None:
    with frontend() as (front, link), front.watch() as watcher:
        waiting = asyncio.create_task(anext(watcher))
        await asyncio.sleep(0)
        link.on_frame(picture(1))
        link.lose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        link.facts = FACTS
        link.on_frame(FACTS)
        link.on_frame(picture(2))
        assert await waiting == picture(2)


async def test_watching_may_begin_before_the_first_engine() -> None:
    with frontend(link=FakeLink(None)) as (front, link), front.watch():
        assert not link.sent
        link.facts = FACTS
        link.on_frame(FACTS)
        assert link.sent == [ON]


async def test_the_number_of_watchers_is_limited() -> None:
    with frontend() as (front, link):
        watchers = [front.watch() for _ in range(MAX_WATCHERS)]
        with pytest.raises(QueueFull, match=f"^{MAX_WATCHERS} .* limit is {MAX_WATCHERS}") as refused:
            front.watch()
        assert (refused.value.needed, refused.value.limit) == (MAX_WATCHERS + 1, MAX_WATCHERS)
        watchers.pop().close()
        front.watch().close()
        assert link.sent == [ON]


async def test_watching_fails_when_there_will_be_no_engine() -> None:
    with frontend() as (front, link), front.watch() as watcher:
        waiting = asyncio.create_task(anext(watcher))
        await asyncio.sleep(0)
        link.lose()
        front.give_up("it crashed five times")
        with pytest.raises(EngineFailure, match="five times"):
            await waiting
        with pytest.raises(EngineFailure, match="five times"):
            front.watch()
