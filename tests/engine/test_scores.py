"""Scores over the fake runner: which records reach which output, once, whatever happens to it."""

from __future__ import annotations

from itertools import cycle

import pytest

from photon_grpc.core.frames import StepFrame
from photon_grpc.core.logprobs import RECORD, LogprobParams
from photon_grpc.core.request import FinishReason
from tests.engine import scored
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting

pytestmark = pytest.mark.usefixtures("windows")

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
BOTH = LogprobParams(num_logprobs=2, num_prompt_logprobs=3, token_ids=(90, 4))


def check(h: Harness, handle: int, prompt: list[int], params: LogprobParams, *, is_first: bool = True) -> None:
    """Check the records of all ids of an output, and those of the prompt, which only the first output has."""
    outcome = h.outcomes[handle]
    assert outcome.logprobs == scored.of_output(prompt, outcome.ids, params)
    expected = scored.of_prompt(prompt, params) if is_first and params.num_prompt_records else b""
    assert outcome.prompt_logprobs == expected


def starts(h: Harness) -> list[tuple[int, int]]:
    """(first position scored, tokens computed in that row) of every row of a prompt, in order."""
    return [(first, batch.counts[row]) for batch in h.runner.batches for row, first in batch.prompt_logprob_rows]


@DEPTHS
@pytest.mark.parametrize(
    "params",
    [
        LogprobParams(num_logprobs=0),
        LogprobParams(num_logprobs=5),
        LogprobParams(token_ids=(3,)),
        LogprobParams(num_prompt_logprobs=0),
        BOTH,
    ],
)
def test_every_id_and_every_prompt_position_has_its_records(params: LogprobParams, depth: int) -> None:
    h = Harness(Setting(depth=depth))
    handle, plain = h.add(PROMPT, 6, logprobs=params), h.add(PROMPT, 6)
    h.run()
    assert h.outcomes[handle].ids == complete(PROMPT, 6) and h.idle()
    check(h, handle, PROMPT, params)
    check(h, plain, PROMPT, LogprobParams())


def test_a_batch_without_score_requests_has_no_score_columns() -> None:
    h = Harness()
    h.add(PROMPT, 6)
    h.run()
    assert not any(batch.prompt_logprob_rows for batch in h.runner.batches)
    assert not any(frame.logprobs or frame.prompt_logprobs for _, frame in h.post.sent if isinstance(frame, StepFrame))


@DEPTHS
def test_a_prompt_in_chunks_is_scored_from_where_the_chunk_before_ended(depth: int) -> None:
    h = Harness(Setting(depth=depth, max_num_batched_tokens=4))
    handle = h.add(PROMPT, 2, logprobs=BOTH)
    h.run()
    assert starts(h) == [(1, 4), (5, 4), (9, 2)]
    check(h, handle, PROMPT, BOTH)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    h = Harness()
    handle = h.add([7], 3, logprobs=BOTH)
    h.run()
    assert starts(h) == []
    check(h, handle, [7], BOTH)


def test_a_scored_prompt_takes_no_hit_and_leaves_one() -> None:
    h = Harness()
    h.add(PROMPT, 1)
    h.run()
    scoring = h.add(PROMPT, 1, logprobs=BOTH)
    h.run()
    finished = h.outcomes[scoring].finished
    assert finished is not None and finished.num_cached_prompt == 0
    check(h, scoring, PROMPT, BOTH)
    other = [90, *PROMPT]
    h.add(other, 1, logprobs=BOTH)
    h.run()
    plain = h.add(other, 1)
    h.run()
    finished = h.outcomes[plain].finished
    assert finished is not None and finished.num_cached_prompt == 8


@DEPTHS
def test_a_prompt_is_scored_by_the_first_of_several_outputs(depth: int) -> None:
    h = Harness(Setting(depth=depth, max_num_batched_tokens=4))
    handle = h.add(PROMPT, 4, num_outputs=3, logprobs=BOTH)
    h.run()
    for index in range(3):
        assert h.outcomes[handle + index].ids == complete(PROMPT, 4, index=index)
        check(h, handle + index, PROMPT, BOTH, is_first=index == 0)
    assert len(starts(h)) == 3


@DEPTHS
def test_positions_scored_before_a_preemption_are_not_scored_again(depth: int) -> None:
    h = Harness(Setting(depth=depth, num_blocks=8, block_size=2, max_num_batched_tokens=2))
    first = h.add([1, 2, 3], 14)
    late = h.add(PROMPT, 2, num_outputs=2, logprobs=BOTH)
    for _ in range(30):
        h.step()
        if h.outcomes[late].num_preemptions:
            break
    # It was ranked last and gave way in the middle of its prompt.
    scored_before = len(starts(h))
    assert 0 < scored_before < len(PROMPT) - 1 and not h.outcomes[late].ids
    # Its sibling waits on: no id is to come before the whole prompt is scored.
    assert h.scheduler.live.siblings.num_seqs == 1
    h.run()
    assert [begin for begin, _ in starts(h)] == sorted({begin for begin, _ in starts(h)})
    assert h.outcomes[first].ids == complete([1, 2, 3], 14)
    for index in range(2):
        assert h.outcomes[late + index].ids == complete(PROMPT, 2, index=index)
        check(h, late + index, PROMPT, BOTH, is_first=index == 0)


def test_a_prompt_whose_caller_has_left_yields_no_scores() -> None:
    h = Harness(Setting(depth=2, max_num_batched_tokens=2))
    handle = h.add(PROMPT, 4, logprobs=BOTH)
    for _ in range(4):
        h.step()
    before = h.outcomes[handle].prompt_logprobs
    assert before and h.runner.unread
    h.abort(handle)
    h.run()
    assert h.outcomes[handle].prompt_logprobs == before and h.idle()


@DEPTHS
@pytest.mark.parametrize("misses", [(0,), (1,), (0, 0, 1)])
def test_drafts_that_are_kept_bring_their_scores(misses: tuple[int, ...], depth: int) -> None:
    h = Harness(Setting(depth=depth, drafts=(3, 0, 5)))
    h.runner.misses = cycle(misses)
    handle = h.add(PROMPT, 17, logprobs=BOTH)
    h.run()
    assert h.outcomes[handle].ids == complete(PROMPT, 17)
    check(h, handle, PROMPT, BOTH)


@DEPTHS
def test_scores_after_an_end_are_dropped_with_their_ids(depth: int) -> None:
    expected = complete(PROMPT, 20)
    stop = expected[5]
    h = Harness(Setting(depth=depth, drafts=(7,)))
    handle = h.add(PROMPT, 20, stop=(stop,), logprobs=BOTH)
    h.run()
    outcome = h.outcomes[handle]
    assert outcome.finished is not None and outcome.finished.reason is FinishReason.STOP_TOKEN
    assert outcome.ids == expected[: expected.index(stop) + 1]
    check(h, handle, PROMPT, BOTH)


def test_rows_beside_those_of_a_failed_step_keep_their_scores() -> None:
    h = Harness(Setting(depth=2))
    h.runner.fail_steps = {2: 0}
    failed = h.add(PROMPT, 6, logprobs=BOTH)
    h.step()
    h.step()
    # Seated in a step that is launched before the failed one is read.
    sound = h.add([3, 4, 5], 6, logprobs=BOTH)
    h.run()
    assert h.outcomes[failed].failed is not None
    assert h.outcomes[failed].logprobs == scored.of_output(PROMPT, h.outcomes[failed].ids, BOTH)
    assert h.outcomes[sound].ids == complete([3, 4, 5], 6)
    check(h, sound, [3, 4, 5], BOTH)
    assert RECORD.size * BOTH.num_records * 6 == len(h.outcomes[sound].logprobs)
