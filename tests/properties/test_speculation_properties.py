"""Drafts never change an output: the embedded model with drafters that are right, wrong, or do their worst.

A story is some requests with options drawn at random (sampling, filters, penalties, biases, bans, grammars, stops,
several outputs, log-probabilities of outputs and prompts), sent to an engine with random limits (rows, chunks, blocks,
prefix cache, preemption, contiguous blocks, static batches, continuations, depth 0 and 1). Each output is compared with
the one of its request alone, without drafts: ids and ends are equal, log-probabilities to a few units in their last
places.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.bits.company import Scenario
from tests.examples import examples
from tests.runner.drafters import KINDS, Story, loaded, play


@pytest.fixture(autouse=True, scope="module")
def _models() -> Iterator[None]:
    yield
    loaded.cache_clear()


paged = st.builds(
    Scenario,
    st.just("story"),
    company=st.sampled_from([1, 3, 8, 16]),
    max_num_batched_tokens=st.sampled_from([5, 16, 40, 2048]),
    prefix_caching=st.booleans(),
    passes=st.sampled_from([1, 1, 2]),
    kv_requests=st.sampled_from([None, 1, 2]),
    crowded=st.booleans(),
    policy=st.sampled_from(["priority", "fcfs", "static"]),
    continuations=st.sampled_from([0, 0, 2]),
)
contiguous = st.builds(
    Scenario,
    st.just("story"),
    company=st.sampled_from([1, 3, 8, 16]),
    max_num_batched_tokens=st.sampled_from([16, 2048]),
    contiguous=st.just(True),
)
stories = st.builds(
    Story,
    seed=st.integers(0, 2**32),
    scenario=st.one_of(paged, paged, paged, contiguous),
    kind=st.sampled_from(KINDS),
    num_drafts=st.sampled_from([1, 3, 5, 7]),
    depth=st.integers(0, 1),
    num_requests=st.just(4),
    may_be_small=st.sampled_from([True, True, True, False]),
)
#: A smaller story takes as long to find as this one to understand.
unshrunk = settings(phases=(Phase.explicit, Phase.generate), deadline=None)


@given(stories)
@settings(unshrunk, max_examples=examples(16))
def test_drafts_change_no_output(story: Story) -> None:
    play(story)


@pytest.mark.full
@given(stories)
@settings(unshrunk, max_examples=examples(10_000))
def test_drafts_change_no_output_of_ten_thousand_stories(story: Story) -> None:
    play(story)


@pytest.mark.parametrize("num_drafts", [1, 7])
def test_right_drafts_are_kept_and_wrong_ones_are_not(num_drafts: int) -> None:
    alone = Scenario("story", company=1)
    _, drafts, right = play(Story(5, alone, 1.0, num_drafts, depth=0, num_requests=8))
    assert drafts and right > 0.9 * drafts
    _, wrong_drafts, right = play(Story(5, alone, 0.0, num_drafts, depth=0, num_requests=8))
    assert right < 0.1 * wrong_drafts
    # Every refused draft costs a step that a right one saves.
    assert wrong_drafts > drafts * (num_drafts + 1) / 2
