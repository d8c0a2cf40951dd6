"""Greedy output equals transformers' whatever the settings are."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.errors import ConfigError
from tests.examples import examples
from tests.runner.models import FAMILIES, FURTHER, WINDOWED, greedy, model, most_likely
from tests.runner.served import Served

LENGTHS = (5, 17, 40, 1, 33)
#: KVGroups, each with blocks of its own.
NUM_GROUPS = dict.fromkeys(FAMILIES, 1) | {WINDOWED: 3} | dict.fromkeys(FURTHER, 1) | {"gemma3": 7}


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


UNEQUAL = prompts(8)


@pytest.mark.each_value
@pytest.mark.parametrize("family", [*FAMILIES, WINDOWED])
@pytest.mark.parametrize("block_size", [8, pytest.param(16, marks=pytest.mark.full), 64])
def test_64_tokens_of_unequal_prompts_equal_transformers(family: str, block_size: int) -> None:
    directory, reference = model(family)
    cache = CacheConfig(block_size=block_size, num_blocks=NUM_GROUPS[family] * 1024 // block_size)
    one, other = (
        Served(directory, cache=cache, scheduler=SchedulerConfig(max_num_batched_tokens=24, async_depth=depth))
        for depth in (0, 1)
    )
    outputs = one.complete(UNEQUAL, 64)
    assert [most_likely(reference, *each) for each in zip(UNEQUAL, outputs, strict=True)] == outputs
    assert other.complete(UNEQUAL, 64) == outputs
    alone = Served(directory, cache=cache)
    # Several blocks, and one token.
    assert [alone.complete([prompt], 64)[0] for prompt in UNEQUAL[2:4]] == outputs[2:4]


COMMON = prompts(1, (20,))[0]
ASKED = [*prompts(2), COMMON + [1, 2], COMMON + [3], COMMON + [1, 2]]


@functools.cache
def expected(family: str = "llama") -> list[list[int]]:
    """Return the reference's continuation of each of ASKED."""
    _, reference = model(family)
    return [greedy(reference, prompt, 12) for prompt in ASKED]


@given(
    cache=st.builds(
        CacheConfig,
        block_size=st.sampled_from([4, 8, 16]),
        num_blocks=st.sampled_from([16, 24, 60]),
        kv_layout=st.sampled_from(["paged", "contiguous"]),
        enable_prefix_caching=st.booleans(),
    ),
    scheduler=st.builds(
        SchedulerConfig,
        max_num_seqs=st.integers(1, 9),
        max_num_batched_tokens=st.integers(1, 60),
        enable_chunked_prefill=st.booleans(),
        scheduling_policy=st.sampled_from(["fcfs", "priority", "deadline", "static"]),
        async_depth=st.integers(0, 1),
    ),
    order=st.permutations(range(len(ASKED))),
    pauses=st.lists(st.integers(0, 4), min_size=len(ASKED), max_size=len(ASKED)),
)
@settings(max_examples=examples(30))
def test_no_setting_and_no_order_changes_what_is_said(
    cache: CacheConfig, scheduler: SchedulerConfig, order: list[int], pauses: list[int]
) -> None:
    served = Served(model("llama")[0], cache=cache, scheduler=scheduler)
    handles = {}
    for number, pause in zip(order, pauses, strict=True):
        handles[number] = served.add(ASKED[number], 12)
        for _ in range(pause):
            if served.post.inbox or served.engine.scheduler.live.has_work():
                served.step()
    served.run()
    assert {number: served.outputs[handle].ids for number, handle in handles.items()} == dict(enumerate(expected()))
    pool = served.engine.scheduler.pool
    assert pool.num_owned == pool.num_limbo == 0


def test_a_storm_of_preemptions_changes_nothing() -> None:
    served = Served(
        model("llama")[0], cache=CacheConfig(block_size=4, num_blocks=15), scheduler=SchedulerConfig(max_num_seqs=8)
    )
    assert served.complete(ASKED, 12) == expected()
    assert served.engine.scheduler.num_preemptions > 0


def test_a_storm_of_preemptions_changes_nothing_behind_windows() -> None:
    directory, reference = model(WINDOWED)
    asked = prompts(3, (6, 3, 9, 1, 7, 5))
    served = Served(
        directory, cache=CacheConfig(block_size=4, num_blocks=39), scheduler=SchedulerConfig(max_num_seqs=8)
    )
    assert served.complete(asked, 36) == [greedy(reference, prompt, 36) for prompt in asked]
    assert served.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_context_that_only_windows_make_room_for_equals_transformers(depth: int) -> None:
    directory, reference = model(WINDOWED)
    asked = prompts(4, (150, 7, 140))
    # 40 blocks of the layer that attends everything, and 7 in each group with a window of 13: 54 of 120.
    cache = CacheConfig(block_size=4, num_blocks=54)
    served = Served(directory, cache=cache, scheduler=SchedulerConfig(max_num_batched_tokens=12, async_depth=depth))
    assert served.complete(asked, 11) == [greedy(reference, prompt, 11) for prompt in asked]
    refused = served.add(asked[0], 12)
    served.run()
    failed = served.outputs[refused].failed
    assert failed is not None and (failed.fault.needed, failed.fault.limit) == (55, 54)


@given(
    cache=st.builds(
        CacheConfig,
        block_size=st.sampled_from([4, 8, 16]),
        num_blocks=st.sampled_from([48, 72, 180]),
        enable_prefix_caching=st.booleans(),
    ),
    scheduler=st.builds(
        SchedulerConfig,
        max_num_seqs=st.integers(1, 9),
        max_num_batched_tokens=st.integers(1, 60),
        async_depth=st.integers(0, 1),
    ),
)
@settings(max_examples=examples(6))
def test_no_setting_changes_what_a_model_with_windows_says(cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    served = Served(model(WINDOWED)[0], cache=cache, scheduler=scheduler)
    assert served.complete(ASKED, 12) == expected(WINDOWED)
    # Asked again, what is found of the prefixes is enough for every window.
    assert served.complete(ASKED, 12) == expected(WINDOWED)
    pool = served.engine.scheduler.pool
    assert pool.num_owned == pool.num_limbo == 0


def test_a_pool_that_holds_no_token_in_every_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 3"):
        Served(model(WINDOWED)[0], cache=CacheConfig(num_blocks=2))


def test_a_run_of_blocks_for_a_context_that_windows_slide_over_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-layout contiguous: .* use paged"):
        Served(model(WINDOWED)[0], cache=CacheConfig(kv_layout="contiguous"))


def test_outputs_of_one_request_are_those_of_separate_ones() -> None:
    served = Served(model("llama")[0], cache=CacheConfig(block_size=8, num_blocks=60))
    handle = served.add(ASKED[2], 12, num_outputs=3)
    served.run()
    assert [served.outputs[handle + index].ids for index in range(3)] == [expected()[2]] * 3
