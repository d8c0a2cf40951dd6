"""Log-probabilities of the real runner: those of transformers' log-softmax, of raw logits.

They depend neither on what else a row asks for nor on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import NAN_LOGITS, Admission, Batch, StepOutput
from photon_grpc.core.logprobs import NO_LOGPROBS, RECORD, LogprobParams
from photon_grpc.core.request import SamplingParams
from photon_grpc.frontend.model import MAX_LOGPROBS
from photon_grpc.kernels.sampling.logprobs import MAX_BEST, MAX_GIVEN
from photon_grpc.runner import logprob_records as score_records
from photon_grpc.runner.build import eager_runner
from photon_grpc.runner.model_runner import ModelRunner
from tests.runner.launched import poison_first_row, step_of
from tests.runner.masks import masks
from tests.runner.models import model
from tests.runner.scored import GREEDY, LONG, ROWS, admission, batches, prompt_of
from tests.runner.served import Served
from tests.runner.test_graphs import Replayed, loaded, new_cache, replayed_runner
from tests.runner.test_greedy import prompts

Record = tuple[int, float, int]

PLAIN = tuple((sampling, NO_LOGPROBS) for sampling, _ in ROWS)


@pytest.fixture(params=["eager", "replayed"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    if request.param == "replayed":
        return replayed_runner(8)[0]
    return eager_runner(loaded(), new_cache(), max_num_seqs=8)


def unpacked(records: bytes) -> list[Record]:
    return list(RECORD.iter_unpack(records))


@torch.inference_mode()
def expected_at(ids: Sequence[int], chosen: int, params: LogprobParams) -> list[Record]:
    """Return the records of the id after `ids`, by transformers."""
    logits = model("llama")[1](torch.tensor([list(ids)])).logits[0, -1].float()
    logprobs, best = logits.log_softmax(-1), logits.argsort(descending=True, stable=True).tolist()
    wanted = [chosen, *best[: max(params.num_logprobs, 0)], *params.token_ids]
    return [(each, float(logprobs[each]), 1 + int((logits > logits[each]).sum())) for each in wanted]


def assert_equal(found: Sequence[Record], expected: Sequence[Record]) -> None:
    assert [(token, rank) for token, _, rank in found] == [(token, rank) for token, _, rank in expected]
    assert [logprob for _, logprob, _ in found] == pytest.approx([logprob for _, logprob, _ in expected], abs=1e-4)


def assert_scored(outputs: Sequence[StepOutput], rows: Sequence[tuple[SamplingParams, LogprobParams]] = ROWS) -> None:
    """Check every row with log-probabilities of every step against transformers."""
    ids = {row: prompt_of(row + 1) for row in range(len(rows))}
    for output in outputs:
        assert not output.faults
        assert list(output.logprobs) == [row for row, (_, params) in enumerate(rows) if params.num_records]
        for row, (_, params) in enumerate(rows):
            if params.num_records:
                found = unpacked(output.logprobs[row])
                assert len(found) == params.num_records
                assert_equal(found, expected_at(ids[row], output.ids[row], params))
            ids[row].append(output.ids[row])


def test_records_are_those_of_transformers_beside_rows_that_ask_for_none(runner: ModelRunner) -> None:
    assert_scored([runner.submit(batch).result() for batch in batches(ROWS)])


def test_scores_change_no_id(runner: ModelRunner) -> None:
    scored = [runner.submit(batch).result() for batch in batches(ROWS)]
    plain = [runner.submit(batch).result() for batch in batches(PLAIN)]
    assert [output.ids for output in scored] == [output.ids for output in plain]
    assert not any(output.logprobs for output in plain)


def test_a_batch_that_only_scores_filters_and_masks_nothing(runner: ModelRunner) -> None:
    rows = tuple(
        (GREEDY if slot % 2 else SamplingParams(1.1, seed=slot), LogprobParams(num_logprobs=3)) for slot in range(5)
    )
    assert_scored([runner.submit(batch).result() for batch in batches(rows)], rows)


def test_masks_and_bans_change_the_chosen_id_and_no_score(runner: ModelRunner) -> None:
    """The rank of the sampled id counts ids that could not be sampled."""
    params = LogprobParams(num_logprobs=4, token_ids=(6,))
    free = expected_at(prompt_of(1), 0, params)[1][0]
    banned = admission(2, prompt_of(1), GREEDY, params, min_tokens=2, banned_until_min=(free,))
    batch = Batch(
        1,
        (1, 2, 3),
        (3, 3, 3),
        (1, 1, 1),
        admissions=(admission(1, prompt_of(1), GREEDY, params), banned, admission(3, prompt_of(1), GREEDY, params)),
        masked=(0,),
    )
    pending = runner.submit(batch)
    pending.sample(masks((9, 13, 200)))
    output = pending.result()
    assert output.ids[0] in (9, 13, 200) and output.ids[1] != free and output.ids[2] == free
    for row in range(3):
        assert_equal(unpacked(output.logprobs[row]), expected_at(prompt_of(1), output.ids[row], params))
    assert unpacked(output.logprobs[1])[0][2] == 2


def test_a_row_that_fails_has_no_scores_and_the_others_have_theirs(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_first_row(runner, monkeypatch)
    output = runner.submit(next(batches(ROWS))).result()
    assert output.ids[0] == NAN_LOGITS and set(output.faults) == {0}
    assert set(output.logprobs) == {2, 3, 4}
    for row in (2, 3, 4):
        found = unpacked(output.logprobs[row])
        assert_equal(found, expected_at(prompt_of(row + 1), output.ids[row], ROWS[row][1]))


def test_the_next_sequence_of_a_slot_is_scored_as_it_asks_itself(runner: ModelRunner) -> None:
    first, second = LogprobParams(num_logprobs=3, token_ids=(5, 6, 7)), LogprobParams(num_logprobs=1)
    for step, params in enumerate((first, second, NO_LOGPROBS, first), 1):
        batch = Batch(step, (1,), (3,), (1,), admissions=(admission(1, prompt_of(1), GREEDY, params),))
        output = runner.submit(batch).result()
        assert bool(output.logprobs) == bool(params.num_records)
        if params.num_records:
            assert_equal(unpacked(output.logprobs[0]), expected_at(prompt_of(1), output.ids[0], params))


# -- prompts -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def expected_prompt(ids: Sequence[int], num_best: int) -> list[list[Record]]:
    """Return the records of positions 1 … len(ids) - 1, by transformers."""
    logits = model("llama")[1](torch.tensor([list(ids)])).logits[0].float()
    logprobs = logits.log_softmax(-1)
    found = []
    for at in range(1, len(ids)):
        row = logits[at - 1]
        wanted = [ids[at], *row.argsort(descending=True, stable=True)[:num_best].tolist()]
        found.append([(each, float(logprobs[at - 1, each]), 1 + int((row > row[each]).sum())) for each in wanted])
    return found


def assert_prompt(records: bytes, expected: Sequence[Sequence[Record]]) -> None:
    assert_equal(unpacked(records), [record for position in expected for record in position])


@pytest.mark.parametrize("width", [7, 64])
def test_a_prompt_is_scored_chunk_by_chunk_beside_others(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Three chunks of one prompt, the first beside another that is scored in one step, each beside a decode row."""
    monkeypatch.setattr(score_records, "SLICE", width)
    long, short = (
        LogprobParams(num_logprobs=2, num_prompt_logprobs=3),
        LogprobParams(num_logprobs=4, num_prompt_logprobs=0),
    )
    decoding = admission(1, prompt_of(1), GREEDY, LogprobParams(num_logprobs=1))
    runner.submit(Batch(1, (1,), (3,), (1,), admissions=(decoding,))).result()
    entered = admission(2, LONG, GREEDY, long), admission(3, prompt_of(3), GREEDY, short)
    outputs = [
        runner.submit(batch).result()
        for batch in (
            Batch(2, (1, 2, 3), (1, 25, 5), (1, 0, 1), admissions=entered, prompt_logprob_rows=((1, 1), (2, 1))),
            Batch(3, (1, 2, 3), (1, 20, 1), (1, 0, 1), prompt_logprob_rows=((1, 26),)),
            Batch(4, (1, 2), (1, 15), (1, 1), prompt_logprob_rows=((1, 46),)),
        )
    ]
    assert [set(output.prompt_logprobs) for output in outputs] == [{1, 2}, {1}, {1}]
    assert_prompt(outputs[0].prompt_logprobs[2], expected_prompt(prompt_of(3), 0))
    assert_prompt(b"".join(output.prompt_logprobs[1] for output in outputs), expected_prompt(LONG, 3))
    assert [set(output.logprobs) for output in outputs] == [{0, 2}, {0, 2}, {0, 1}]
    # After a row that samples nothing.
    _, drawn = outputs[0].ids
    assert_equal(unpacked(outputs[0].logprobs[2]), expected_at(prompt_of(3), drawn, short))
    assert_equal(unpacked(outputs[2].logprobs[1]), expected_at(LONG, outputs[2].ids[1], long))


def test_a_resumed_prompt_is_scored_from_where_its_scores_ended(runner: ModelRunner) -> None:
    """It is computed again from its beginning, with what was generated behind it."""
    params, expected = LogprobParams(num_prompt_logprobs=2), expected_prompt(LONG, 2)
    resumed = Admission(1, (*LONG, 5, 6), len(LONG), 0, (tuple(range(1, 11)),), GREEDY, logprobs=params)
    first = runner.submit(Batch(1, (1,), (50,), (0,), admissions=(resumed,), prompt_logprob_rows=((0, 31),))).result()
    second = runner.submit(Batch(2, (1,), (12,), (1,), prompt_logprob_rows=((0, 51),))).result()
    assert_prompt(first.prompt_logprobs[0], expected[30:50])
    assert_prompt(second.prompt_logprobs[0], expected[50:])


def test_a_chunk_of_one_token_is_scored_and_one_behind_the_prompt_has_nothing_to_score(runner: ModelRunner) -> None:
    params, expected = LogprobParams(num_prompt_logprobs=1), expected_prompt(LONG, 1)
    first = Batch(1, (1,), (58,), (0,), admissions=(admission(1, LONG, GREEDY, params),), prompt_logprob_rows=((0, 1),))
    outputs = [
        runner.submit(batch).result()
        for batch in (
            first,
            Batch(2, (1,), (1,), (0,), prompt_logprob_rows=((0, 59),)),
            Batch(3, (1,), (1,), (1,), prompt_logprob_rows=((0, 60),)),
        )
    ]
    assert_prompt(outputs[0].prompt_logprobs[0], expected[:58])
    assert_prompt(outputs[1].prompt_logprobs[0], expected[58:])
    assert outputs[2].prompt_logprobs == {0: b""}


def test_a_prompt_that_cannot_be_scored_fails_with_its_step_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(runner)

    def no_memory(batch: Batch, hidden: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no memory for the logits")

    with monkeypatch.context() as patched:
        patched.setattr(step, "record_prompts", no_memory)
        failed = Batch(
            1,
            (1,),
            (5,),
            (1,),
            admissions=(admission(1, LONG[:5], GREEDY, LogprobParams()),),
            prompt_logprob_rows=((0, 1),),
        )
        assert set(runner.submit(failed).result().faults) == {0}
    assert_scored([runner.submit(batch).result() for batch in batches(ROWS)])


def test_rows_behind_one_whose_step_failed_keep_their_scores(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed row is not computed, so the others are rows before their own."""
    params = LogprobParams(num_logprobs=2, num_prompt_logprobs=1)
    lost = Batch(1, (1,), (3,), (1,), admissions=(admission(1, prompt_of(1), GREEDY, params),))
    with monkeypatch.context() as patched:
        patched.setattr(runner.table, "apply", lambda batch: 1 / 0)
        assert set(runner.submit(lost).result().faults) == {0}
    entered = admission(2, LONG[:9], GREEDY, params), admission(3, prompt_of(3), GREEDY, params)
    output = runner.submit(
        Batch(2, (1, 2, 3), (1, 9, 5), (1, 1, 1), admissions=entered, prompt_logprob_rows=((1, 1), (2, 1)))
    ).result()
    assert set(output.faults) == {0} and set(output.logprobs) == set(output.prompt_logprobs) == {1, 2}
    for row, prompt in ((1, LONG[:9]), (2, prompt_of(3))):
        assert_equal(unpacked(output.logprobs[row]), expected_at(prompt, output.ids[row], params))
        assert_prompt(output.prompt_logprobs[row], expected_prompt(prompt, 1))


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("make", [Replayed, lambda: few_blocks()], ids=["replayed", "eager, preempted"])
def test_requests_get_each_score_once_chunked_preempted_and_beside_others(
    make: Callable[[], Served], depth: int
) -> None:
    served = make()
    served.assembled.runner.depth = depth  # type: ignore[misc]
    asked = prompts(4, (33, 9, 12, 7))
    params = (
        LogprobParams(num_logprobs=2, num_prompt_logprobs=1),
        LogprobParams(num_logprobs=0, token_ids=(3,)),
        NO_LOGPROBS,
        LogprobParams(num_prompt_logprobs=4),
    )
    samplings = GREEDY, SamplingParams(1.1, top_p=0.9, seed=8), GREEDY, GREEDY
    each = zip(asked, samplings, params, strict=True)
    handles = [served.add(prompt, 14, sampling, logprobs=scores) for prompt, sampling, scores in each]
    served.run()
    for handle, prompt, scores in zip(handles, asked, params, strict=True):
        output = served.outputs[handle]
        assert output.failed is None and len(output.ids) == 14
        expected = [
            record
            for at, token in enumerate(output.ids if scores.num_records else ())
            for record in expected_at([*prompt, *output.ids[:at]], token, scores)
        ]
        assert_equal(unpacked(output.logprobs), expected)
        assert_prompt(
            output.prompt_logprobs,
            expected_prompt(prompt, scores.num_prompt_logprobs) if scores.num_prompt_records else [],
        )
    assert served.engine.scheduler.num_preemptions > 0 or isinstance(served, Replayed)


def few_blocks() -> Served:
    """Prompts come in chunks, and sequences lose their blocks on the way."""
    return Served(
        model("llama")[0],
        cache=CacheConfig(block_size=4, num_blocks=15),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
    )


def test_the_kernels_have_room_for_all_that_a_request_may_ask_for() -> None:
    assert min(MAX_BEST, MAX_GIVEN) >= MAX_LOGPROBS
