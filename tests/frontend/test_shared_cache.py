"""A cache bounded in bytes, of which every caller keeps its share."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from photon_grpc.frontend.shared_cache import HOLD_BYTES, MAX_CALLERS, SharedCache


def full_of(callers: dict[str, int], max_bytes: int) -> SharedCache[str, int]:
    cache: SharedCache[str, int] = SharedCache(max_bytes)
    for caller, count in callers.items():
        for number in range(count):
            cache.keep(caller, f"{caller}{number}", number, 10_000)
    return cache


def test_churn_of_one_caller_evicts_nothing_of_a_smaller_one() -> None:
    cache = full_of({"b": 3, "a": 5000}, 100 * (10_000 + HOLD_BYTES))
    assert [cache.find("b", f"b{number}") for number in range(3)] == [0, 1, 2]
    assert len(cache) == 100
    assert cache.find("a", "a4999") == 4999 and cache.find("a", "a10") is None


def test_a_shared_entry_stays_when_its_first_owner_drops_it() -> None:
    cache = full_of({"a": 1}, 100 * (10_000 + HOLD_BYTES))
    assert cache.find("b", "a0") == 0
    for number in range(1, 500):
        cache.keep("a", f"a{number}", number, 10_000)
    assert cache.find("b", "a0") == 0


def test_callers_with_too_much_keep_equal_shares() -> None:
    cache = full_of(dict.fromkeys("abcd", 100), 40 * (10_000 + HOLD_BYTES))
    assert [sum(cache.find(each, f"{each}{n}") is not None for n in range(100)) for each in "abcd"] == [10] * 4


def test_an_entry_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache = full_of({"a": 5}, 60_000)
    cache.keep("b", "huge", 1, 10**9)
    assert cache.find("b", "huge") is None
    assert [cache.find("a", f"a{number}") for number in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_the_sizes_of_the_cache_add_up(seed: int) -> None:
    draw = random.Random(seed)
    cache: SharedCache[int, int] = SharedCache(50_000)
    for _ in range(2000):
        caller, key = draw.choice("abcdef"), draw.randrange(60)
        if cache.find(caller, key) is None:
            cache.keep(caller, key, key, 100 * key)
        assert cache.num_bytes <= 50_000
    holds = sum(map(len, cache._used.values()))
    assert cache.num_bytes == sum(100 * key for key in cache._entries) + HOLD_BYTES * holds
    assert {key for used in cache._used.values() for key in used} == set(cache._entries)
    for caller, used in cache._used.items():
        assert cache._num_bytes_of[caller] == sum(100 * key + HOLD_BYTES for key in used)


def test_any_number_of_callers_stays_within_the_memory_limit() -> None:
    max_bytes = 2**19
    cache: SharedCache[str, int] = SharedCache(max_bytes)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1500):
            cache.keep(f"peer {number}", "the same", 1, 10_000)
            cache.find(f"peer {number}", "the same")
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1.25 * max_bytes


def test_with_too_many_callers_the_longest_idle_is_forgotten() -> None:
    cache: SharedCache[int, int] = SharedCache(2**40)
    for caller in range(2 * MAX_CALLERS):
        cache.keep(str(caller), caller, caller, 1)
        assert cache.find("0", 0) == 0
    assert len(cache) == len(cache._used) == MAX_CALLERS
    assert cache.find("1", 1) is None
