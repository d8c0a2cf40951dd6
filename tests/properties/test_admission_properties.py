"""Admission to pools hardly larger than one request.

Whatever windows free, an admitted request ends as it does alone, and a refused one could not end.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting
from tests.examples import examples

settings_of = st.builds(
    Setting,
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([1, 2, 3, 5, 8, 13, 40]),
    chunked=st.sampled_from([True, True, True, False]),
    prefix_caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "static"]),
    depth=st.integers(0, 2),
    windows=st.sampled_from([(0,), (5,), (0, 5), (0, 1), (0, 8), (0, 3, 7)]),
    drafts=st.sampled_from([(0,), (0,), (3,), (0, 1, 5)]),
)
#: Prompt, max_tokens, outputs, steps before the next one comes, whether it leaves then.
requests = st.lists(
    st.tuples(
        st.integers(1, 40).map(lambda n: list(range(n))) | st.lists(st.integers(0, 2), min_size=1, max_size=30),
        st.integers(1, 14),
        st.integers(1, 3),
        st.integers(0, 6),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def most_held(setting: Setting, num_tokens: int) -> int:
    """Blocks of a sequence, counted: wherever a chunk begins, the most of each group."""
    size, chunk = setting.block_size, setting.max_num_batched_tokens if setting.chunked else num_tokens
    total = 0
    for window in setting.windows:
        held = 0
        for start in range(num_tokens + size):
            first = max(0, start - window + 1) if window else 0
            held = max(held, len({position // size for position in range(first, start + chunk)}))
        total += min(held, len({position // size for position in range(num_tokens)}))
    return total


@given(settings_of, requests, st.integers(0, 7), st.integers(0, 3))
@settings(max_examples=examples(200), deadline=None)
def test_what_is_admitted_ends_and_nothing_is_refused_that_fits(
    setting: Setting, asked: list[tuple[list[int], int, int, int, bool]], which: int, spare: int
) -> None:
    needs = [most_held(setting, len(prompt) + max_tokens - 1) for prompt, max_tokens, *_ in asked]
    h = Harness(replace(setting, total_blocks=needs[which % len(needs)] + spare))
    h.runner.misses = cycle((0, 0, 1, 0))
    handles, left = [], set()
    for prompt, max_tokens, num_outputs, steps, leaves in asked:
        handles.append(h.add(prompt, max_tokens, num_outputs=num_outputs, seed=3))
        for _ in range(steps):
            if h.post.inbox or h.scheduler.live.has_work():
                h.step()
        if leaves:
            left |= {handles[-1]}
            h.abort(handles[-1])
    h.run(max_steps=1500)
    assert h.idle()
    h.pool.reset_prefixes()
    h.pool.check()
    assert h.pool.num_free == h.pool.num_blocks
    for handle, need, (prompt, max_tokens, num_outputs, *_) in zip(handles, needs, asked, strict=True):
        for index in range(num_outputs):
            outcome = h.outcomes[handle + index]
            if need > h.pool.num_blocks:
                assert (outcome.failed.reason, outcome.failed.needed) == ("KV_CAPACITY", need)
                continue
            assert outcome.failed is None
            expected = complete(prompt, max_tokens, seed=3, index=index)
            assert outcome.ids == (expected if outcome.finished else expected[: len(outcome.ids)])
            assert outcome.finished or handle + index in left
