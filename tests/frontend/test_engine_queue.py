"""Requests are refused at once, before any work, while the engine's queue is full."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from photon_grpc.core.ask import ChatInput, ChatMessage
from photon_grpc.core.stats import Load
from photon_grpc.errors import PromptTooLong, QueueFull
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.engine_queue import EngineQueue
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.input.size import estimate_tokens
from tests.frontend.fake_engine import FACTS, FakeLink, ask, frontend, served


async def refusal(front: Frontend, *asked: object) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        await front.stream(ask(*asked))  # type: ignore[arg-type]
    return caught.value


async def test_a_burst_is_refused_before_tokenizing() -> None:
    may_go = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        link = FakeLink()
        front = Frontend(link=link, model=served(), encoder=ThreadEncoder(served(), pool))
        pool.submit(may_go.wait)
        tasks = [asyncio.create_task(front.stream(ask("Hello"))) for _ in range(40)]
        while sum(task.done() for task in tasks) < 36:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        refused = [task.exception() for task in tasks if task.done()]
        assert len(refused) == 36 and all(isinstance(error, QueueFull) for error in refused)
        assert not link.adds
        may_go.set()
        await asyncio.wait(tasks)
    assert len(link.adds) == FACTS.max_queue_size == 4


async def test_an_old_load_still_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    with frontend() as (front, link):
        link.on_frame(Load(queued=4, ended_per_s=2.0))
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + 3600)
        refused = await refusal(front)
        assert (refused.needed, refused.limit, refused.retry_after_s) == (5, 4, 2.0)
        link.on_frame(Load())
        await front.stream(ask())


async def test_what_was_sent_counts_until_the_engine_has_counted_it() -> None:
    with frontend() as (front, link):
        for _ in range(4):
            await front.stream(ask())
        await refusal(front)
        link.on_frame(Load(running=1))  # told before it read any of them
        await refusal(front)
        link.step(load=Load(queued=3))
        await front.stream(ask())
        await refusal(front)


async def test_short_lived_callers_send_nothing_to_an_engine_that_does_not_read() -> None:
    with frontend() as (front, link):
        for _ in range(100):
            with contextlib.suppress(QueueFull):
                (await front.stream(ask())).close()
        assert len(link.adds) == len(link.aborted) == 4


async def test_a_caller_with_fewer_prompts_in_preparation_finds_room_in_a_full_queue() -> None:
    may_go = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        link = FakeLink()
        front = Frontend(link=link, model=served(), encoder=ThreadEncoder(served(), pool))
        pool.submit(may_go.wait)
        many = [asyncio.create_task(front.stream(ask("a", caller="a"))) for _ in range(6)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(front.stream(ask("b", caller="b"))) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert [task.done() for task in (*many, *few)] == [False, False, True, True, True, True, False, False, True]
        may_go.set()
        results = await asyncio.gather(*many, *few, return_exceptions=True)
        assert [isinstance(each, QueueFull) for each in results] == [at in (2, 3, 4, 5, 8) for at in range(9)]
        assert len(link.adds) == 4
        link.step(load=Load())
        for _ in range(4):  # who was sent away has left nothing behind
            await front.stream(ask())


async def test_a_displaced_caller_that_is_cancelled_stays_cancelled() -> None:
    queue, began = EngineQueue(), asyncio.Event()

    async def prepare() -> None:
        with queue.place(1, FACTS, caller="a"):
            began.set()
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(prepare()) for _ in range(4)]
    await began.wait()
    tasks[-1].cancel()
    queue.place(1, FACTS, caller="b")
    await asyncio.wait([tasks[-1]])
    assert tasks[-1].cancelled()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not queue._preparing and not queue._num_preparing


async def test_prompt_tokens_are_bounded_and_an_empty_queue_takes_any() -> None:
    with frontend(link=FakeLink(msgspec.structs.replace(FACTS, max_queued_tokens=50))) as (front, link):
        await front.stream(ask((1,) * 30))
        refused = await refusal(front, (1,) * 21)
        assert (refused.needed, refused.limit) == (51, 50)
        await front.stream(ask((1,) * 20))
        link.step(load=Load(queued=1, queued_prompt_tokens=30))
        await refusal(front, (1,) * 21)
        link.on_frame(Load())
        await front.stream(ask((1,) * 60))


async def test_a_text_counts_by_an_estimate_until_it_is_tokenized() -> None:
    may_go = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        front = Frontend(link=FakeLink(), model=served(), encoder=ThreadEncoder(served(), pool))
        pool.submit(may_go.wait)
        first = asyncio.create_task(front.stream(ask("z" * 80)))
        await asyncio.sleep(0)
        await refusal(front, (1,) * 85)  # 21 and 85 tokens; 100 may wait
        may_go.set()
        await first
        await refusal(front, "q" * 24)  # 80 and 24, not 80 and 7


@pytest.mark.parametrize("ends", ["too long", "cancelled"])
async def test_a_place_is_released_however_the_preparation_ends(ends: str) -> None:
    with frontend() as (front, _):
        for _ in range(10):
            task = asyncio.create_task(front.stream(ask("z" * 500)))
            await asyncio.sleep(0)
            if ends == "cancelled":
                task.cancel()
            with pytest.raises((PromptTooLong, asyncio.CancelledError)):
                await task
        await front.stream(ask())


async def test_a_lost_engine_takes_its_queue_with_it() -> None:
    with frontend() as (front, link):
        streams = [await front.stream(ask()) for _ in range(4)]
        link.on_frame(Load(queued=4))
        facts, link.facts = link.facts, None
        link.on_lost()
        link.facts = facts
        assert facts is not None
        link.on_frame(facts)
        for stream in streams:
            stream.close()
        await front.stream(ask())


def test_the_estimate_is_exact_for_ids_and_never_above_the_context() -> None:
    chat = ChatInput((ChatMessage("user", "x" * 40), ChatMessage("user", "y" * 40)))
    given: tuple[str | tuple[int, ...], ...] = ((1,) * 77, "x" * 40, "x" * 4000)
    assert [estimate_tokens(ask(each).input, FACTS.max_model_len) for each in given] == [77, 11, FACTS.max_model_len]
    assert estimate_tokens(chat, FACTS.max_model_len) == 21


async def test_an_owner_with_few_requests_passes_a_full_queue() -> None:
    queue = EngineQueue()
    queue.update(Load(queued=FACTS.max_queue_size, longest_queue=5))
    for num_of_owner in (1, 4):
        queue.check(1, FACTS, num_of_owner)
    for num_of_owner in (0, 5, 6):
        with pytest.raises(QueueFull):
            queue.check(1, FACTS, num_of_owner)
