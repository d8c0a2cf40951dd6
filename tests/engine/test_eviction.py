"""Whose prefixes are evicted first, and that it changes no output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.engine.blocks.eviction import EvictionOrder
from photon_grpc.engine.blocks.prefix_index import RadixIndex
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting
from tests.kv_plans import kv_plan

PROMPT = list(range(17))


def others(first: int, count: int) -> list[list[int]]:
    """Prompts that share no beginning."""
    return [[first + n, *range(50, 70)] for n in range(count)]


def num_cached(h: Harness, prompt: list[int], **more: object) -> int:
    handle = h.add(prompt, 2, seed=5, **more)
    h.run()
    finished = h.outcomes[handle].finished
    assert finished is not None and h.outcomes[handle].ids == complete(prompt, 2, 5)
    return finished.num_cached_prompt


def crowd(h: Harness, first: int, count: int) -> None:
    for prompt in others(first, count):
        num_cached(h, prompt)


def test_a_session_finds_its_blocks_after_many_requests_without_one() -> None:
    h = Harness(Setting(num_blocks=20, windows=(0,)))
    num_cached(h, PROMPT, session_id="mine")
    crowd(h, 20, 8)
    assert num_cached(h, PROMPT, session_id="mine") == 16
    h = Harness(Setting(num_blocks=20, windows=(0,)))
    num_cached(h, PROMPT)
    crowd(h, 20, 8)
    assert num_cached(h, PROMPT) == 0


def test_hits_of_sessions_are_counted() -> None:
    h = Harness(Setting(num_blocks=20, windows=(0,)))
    for _ in range(3):
        num_cached(h, PROMPT, session_id="mine")
    num_cached(h, PROMPT)
    load = h.engine.stats.load(h.scheduler)
    assert (load.cached_prompt_tokens, load.session_cached_prompt_tokens) == (48, 32)


def test_a_session_that_does_not_come_back_makes_room_at_last() -> None:
    h = Harness(Setting(num_blocks=20, windows=(0,)))
    num_cached(h, PROMPT, session_id="gone")
    crowd(h, 20, 60)
    assert num_cached(h, PROMPT, session_id="gone") == 0


def test_with_sessions_only_the_cache_evicts_by_age() -> None:
    h = Harness(Setting(num_blocks=20, windows=(0,)))
    for number, prompt in enumerate(others(20, 8)):
        num_cached(h, prompt, session_id=str(number))
    assert num_cached(h, others(20, 8)[0], session_id="0") == 0
    assert num_cached(h, others(20, 8)[-1], session_id="7") > 0


def test_sessions_that_never_come_back_leave_half_of_the_cache_to_others() -> None:
    h = Harness(Setting(num_blocks=24, windows=(0,)))
    plain = list(range(100, 117))
    num_cached(h, plain)
    hits = []
    for number, prompt in enumerate(others(20, 40)):
        num_cached(h, prompt[:17], session_id=str(number))
        hits.append(num_cached(h, plain))
    assert hits == [16] * 40


def test_a_session_keeps_its_blocks_through_more_turns_than_there_are_blocks() -> None:
    h = Harness(Setting(num_blocks=40, windows=(0,)))
    num_cached(h, PROMPT, session_id="mine")
    crowd(h, 20, 20)
    assert num_cached(h, PROMPT, session_id="mine") == 16


def test_a_block_whose_content_is_forgotten_is_no_session_s_any_more() -> None:
    order = EvictionOrder()
    order.keep([1])
    order.add(1)
    order.forget(1)
    order.add(1)
    order.add(2)
    order.keep([3])
    order.add(3)
    assert order.first(1000) == 1


def test_blocks_of_every_group_are_kept_and_unknown_ones_are_not() -> None:
    index = RadixIndex(kv_plan(1, 0, 2))
    index.publish(("",), None, (1,), [1, 2])
    index.publish(("",), None, (2,), [3, 4])
    index.keep([1, 2, 9])
    for block in (1, 2, 3, 4):
        index.mark_unused(block)
    assert index.evict() == {3, 4}
    assert 9 not in index._unused._kept


@given(st.lists(st.tuples(st.sampled_from(["add", "keep", "remove", "forget", "first"]), st.integers(1, 9))))
def test_the_next_eviction_is_unused_and_the_oldest_of_its_kind(calls: list[tuple[str, int]]) -> None:
    order, resting, kept = EvictionOrder(), list[int](), set[int]()
    for call, block in calls:
        if call == "add" and block not in resting:
            order.add(block)
            resting.append(block)
        elif call == "keep" and block not in resting:
            order.keep([block])
            kept.add(block)
        elif call in ("remove", "forget"):
            getattr(order, call)(block)
            resting = [each for each in resting if each != block]
            kept -= {block} if call == "forget" else set()
        elif call == "first" and resting:
            plain = [each for each in resting if each not in kept]
            # Far more turns than are taken here are needed to make a session's block the older one.
            of_sessions = [each for each in resting if each in kept]
            assert order.first(1000) == (plain or of_sessions)[0]
        assert len(order) == len(resting)
