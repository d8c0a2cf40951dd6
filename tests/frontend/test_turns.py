"""Streams take turns: few write in one turn of the event loop, in the order in which they have something to write."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.frontend.write_turns import MESSAGES_A_TURN, MOST_MORE, SECONDS_A_MESSAGE, WriteTurns
from tests.frontend.fake_engine import FACTS, FakeLink, ask, frontend, served

MODEL = served()


@given(limit=st.integers(1, 5), num_waiters=st.integers(0, 40), cancelled=st.sets(st.integers(0, 39)))
def test_a_turn_settles_a_bounded_number_in_order_of_arrival(limit: int, num_waiters: int, cancelled: set[int]) -> None:
    settled: list[int] = []
    sizes: list[int] = []

    async def run() -> None:
        turns, loop = WriteTurns(limit, lambda: 0.0), asyncio.get_running_loop()
        waiters = [loop.create_future() for _ in range(num_waiters)]
        for number, waiter in enumerate(waiters):
            turns.settle(waiter)
            if not waiter.done() and number in cancelled:
                waiter.cancel()
        for _ in range(num_waiters + 1):
            done = [number for number, each in enumerate(waiters) if each.done() and not each.cancelled()]
            new = [number for number in done if number not in settled]
            settled.extend(new)
            sizes.append(len(new))
            await asyncio.sleep(0)

    asyncio.run(run())
    assert settled == sorted(settled)
    assert set(range(num_waiters)) - set(settled) <= cancelled
    assert all(size <= limit for size in sizes)
    assert len([size for size in sizes if size]) == -(-len(settled) // limit), "no turn goes by unused"


async def test_a_place_is_free_again_in_the_next_turn() -> None:
    turns = WriteTurns(2, lambda: 0.0)
    assert [turns.take() for _ in range(4)] == [True, True, False, False]
    await asyncio.sleep(0)
    assert turns.take()


async def test_waiting_streams_go_before_later_ones() -> None:
    turns, loop = WriteTurns(1, lambda: 0.0), asyncio.get_running_loop()
    assert turns.take()
    waiter = loop.create_future()
    turns.settle(waiter)
    await asyncio.sleep(0)
    assert waiter.done() and not turns.take()


@pytest.mark.parametrize(("other_work_s", "num_more"), [(0.0, 0), (10 * SECONDS_A_MESSAGE, 10), (60.0, MOST_MORE)])
async def test_a_long_turn_lets_more_streams_into_the_next(other_work_s: float, num_more: int) -> None:
    now_s = 0.0
    turns, loop = WriteTurns(2, lambda: now_s), asyncio.get_running_loop()
    waiters = [loop.create_future() for _ in range(300)]
    for waiter in waiters:
        turns.settle(waiter)
    for number in (1, 2):
        now_s += 1.01 * other_work_s
        await asyncio.sleep(0)
        assert sum(waiter.done() for waiter in waiters) == 2 + number * (2 + num_more)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.sleep(0)
    assert [turns.take() for _ in range(3)] == [True, True, False], "an idle loop saves none up"


async def test_between_two_turns_of_the_loop_few_of_many_streams_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other work of the loop, for example a new call, waits for only a few of them."""
    num_streams = 6 * MESSAGES_A_TURN
    facts = msgspec.structs.replace(FACTS, max_queue_size=num_streams, max_queued_tokens=100_000)
    with frontend(MODEL, link=FakeLink(facts)) as (front, link):
        monkeypatch.setattr(front._turns, "_clock", lambda: 0.0)
        streams = [await front.stream(ask()) for _ in range(num_streams)]
        reading = [asyncio.ensure_future(stream.__anext__()) for stream in streams]
        await asyncio.sleep(0)
        link.step(*((handle, 65) for handle in range(1, num_streams + 1)))
        num_read: list[int] = []
        while not all(task.done() for task in reading):
            num_read.append(sum(task.done() for task in reading))
            await asyncio.sleep(0)
        assert max(later - before for before, later in itertools.pairwise(num_read)) <= MESSAGES_A_TURN
        for stream in streams:
            stream.close()
