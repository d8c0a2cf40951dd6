"""Rows whose sampling waits for a mask sample what it allows, and no other row is affected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import NAN_LOGITS, NOTHING_TO_SAMPLE, Admission, Batch
from photon_grpc.core.request import FinishReason, SamplingParams
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs
from photon_grpc.errors import InternalFailure, InvalidConstraint, NumericFailure
from photon_grpc.runner.build import eager_runner
from photon_grpc.runner.model_runner import ModelRunner
from tests.engine.tables import END, Table, TableGrammars
from tests.runner.launched import poison_first_row
from tests.runner.masks import ALLOWED, GREEDY, MASKED, VOCAB_SIZE, batches, masks
from tests.runner.models import greedy, model
from tests.runner.served import Served
from tests.runner.test_graphs import Replayed, loaded, new_cache, replayed_runner


@pytest.fixture(params=["eager", "replayed"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    if request.param == "replayed":
        return replayed_runner(8)[0]
    return eager_runner(loaded(), new_cache(), max_num_seqs=8)


def ids_of(runner: ModelRunner, masked: tuple[int, ...], depth: int) -> list[tuple[int, ...]]:
    pending, outputs = [], []
    for batch, allowed in zip(batches(masked), (*ALLOWED, ()), strict=True):
        pending.append(runner.submit(batch))
        if len(pending) > max(depth, 1):
            outputs.append(pending.pop(0).result())
        if batch.masked:
            assert pending[-1].drafts() == ()
            pending[-1].sample(masks(*allowed))
        if depth == 0:
            outputs.append(pending.pop().result())
    outputs += [each.result() for each in pending]
    assert not any(output.faults for output in outputs)
    return [output.ids for output in outputs]


@pytest.mark.parametrize("depth", [0, 1])
def test_masked_rows_sample_what_is_allowed_and_others_are_unchanged(runner: ModelRunner, depth: int) -> None:
    masked, free = ids_of(runner, MASKED, depth), ids_of(runner, (), depth)
    for ids, plain, allowed in zip(masked, free, ALLOWED, strict=False):
        assert all(ids[row] in may for row, may in zip(MASKED, allowed, strict=True))
        assert any(ids[row] != plain[row] for row in MASKED)
    for row in (1, 3):
        assert [ids[row] for ids in masked] == [ids[row] for ids in free]


def test_a_greedy_row_samples_the_likeliest_that_is_allowed(runner: ModelRunner) -> None:
    _, reference = model("llama")
    with torch.inference_mode():
        logits = reference(torch.tensor([[1, 5, 9, 7]])).logits[0, -1]
    allowed = [token for token in range(320) if token % 7 == 2]
    pending = runner.submit(batches((0,))[0])
    pending.sample(masks(allowed))
    assert pending.result().ids[0] == allowed[int(logits[allowed].argmax())]


def test_a_mask_that_allows_all_changes_nothing_and_holds_for_its_step_alone(runner: ModelRunner) -> None:
    expected = ids_of(runner, (), 0)
    first, second, third = batches(MASKED)
    found = []
    for batch in (first, second, third):
        pending = runner.submit(batch)
        pending.sample(masks(*[range(320)] * 3)) if batch.masked else None
        found.append(pending.result().ids)
    assert found == expected
    assert not runner.table.numbers.mask_row.any()


def test_masks_hold_for_the_rows_of_their_step_whichever_those_of_the_step_before_were(runner: ModelRunner) -> None:
    first, second, third = batches(())
    expected = [runner.submit(batch).result().ids for batch in (first, second, third)]
    other = {0: (first, (0, 2)), 1: (second, (1,)), 2: (third, ())}
    for step, (batch, masked) in other.items():
        pending = runner.submit(replace(batch, masked=masked))
        pending.sample(masks(*[(expected[step][row],) for row in masked])) if masked else None
        assert pending.result().ids == expected[step]
        rows = {slot: row for slot, row in enumerate(runner.table.numbers.mask_row.tolist()) if row}
        assert rows == {batch.slots[row]: number for number, row in enumerate(masked, 1)}


def test_masks_hold_again_for_a_slot_that_another_sequence_takes(runner: ModelRunner) -> None:
    first, second, _ = batches(())
    for batch in (first, second, first, second):
        pending = runner.submit(replace(batch, masked=(0, 2)))
        pending.sample(masks((7,), (8,)))
        assert pending.result().ids[0:3:2] == (7, 8)


def test_flags_that_could_not_be_sent_are_sent_again(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = batches(())
    pending = runner.submit(replace(first, masked=(0, 2)))
    pending.sample(masks((7,), (8,)))
    table = runner.table
    with monkeypatch.context() as broken:
        broken.setattr(table, "numbers", table.numbers._replace(mask_row=None))
        with pytest.raises(AttributeError):
            table.apply(second)
    table.apply(second)
    assert not table.numbers.mask_row.any()


def test_a_mask_that_allows_nothing_is_a_fault_of_its_row_that_is_no_failure_of_numbers(runner: ModelRunner) -> None:
    expected = runner.submit(batches(())[0]).result().ids
    pending = runner.submit(batches(MASKED)[0])
    pending.sample(masks(range(320), (), range(320)))
    output = pending.result()
    assert output.ids == (*expected[:2], NOTHING_TO_SAMPLE, *expected[3:])
    assert {row: fault.reason for row, fault in output.faults.items()} == {2: InvalidConstraint.reason}


def test_what_a_ban_and_a_mask_leave_together_may_be_nothing(runner: ModelRunner) -> None:
    banned = Admission(1, (1, 5, 9), 3, 0, ((1,),), GREEDY, min_tokens=2, banned_until_min=(7, 40))
    other = Admission(2, (1, 5, 9), 3, 0, ((2,),), GREEDY, min_tokens=2, banned_until_min=(7, 40))
    pending = runner.submit(Batch(1, (1, 2), (3, 3), (1, 1), admissions=(banned, other), masked=(0, 1)))
    pending.sample(masks((7, 40), (7, 8, 40)))
    assert pending.result().ids == (NOTHING_TO_SAMPLE, 8)


def test_numbers_that_fail_are_told_apart_from_masks(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_first_row(runner, monkeypatch)
    pending = runner.submit(batches((0, 2))[0])
    pending.sample(masks((7, 9), ()))
    output = pending.result()
    assert (output.ids[0], output.ids[2]) == (NAN_LOGITS, NOTHING_TO_SAMPLE)
    assert [output.faults[row].reason for row in (0, 2)] == [NumericFailure.reason, InvalidConstraint.reason]


def test_masks_of_another_size_are_a_fault_of_the_step(runner: ModelRunner) -> None:
    pending = runner.submit(batches(MASKED)[0])
    pending.sample(masks(range(320), range(320)))
    assert set(pending.result().faults) == set(range(5))
    behind = runner.submit(batches(())[1]).result()
    assert set(behind.faults) == set(range(5))


def test_no_step_is_launched_between_a_body_and_its_tail(runner: ModelRunner) -> None:
    first, second, _ = batches(MASKED)
    pending = runner.submit(first)
    with pytest.raises(InternalFailure, match="step 2"):
        runner.submit(second)
    with pytest.raises(InternalFailure):
        pending.result()
    pending.sample(masks(*ALLOWED[0]))
    assert not pending.result().faults


#: Ids of class 1, then of 2, over and over.
PAIRS = Table(({1: 1}, {2: 0}), frozenset())
#: Three ids of class 3 and no more.
THREE = Table(({3: 1}, {3: 2}, {3: 3}, {}), frozenset({3}))
#: Two ids, then nothing: neither a way on nor an end.
STUCK = Table(({0: 1}, {1: 2}, {}), frozenset())
SEEDED = SamplingParams(temperature=1.1, seed=8)
#: Prompt, sampling, what the output keeps to.
ASKED = (
    ([5, 6, 7, 8, 9], GREEDY, PAIRS),
    ([3] * 17, GREEDY, THREE),
    ([1, 2], GREEDY, STUCK),
    ([9, 9, 4], SEEDED, PAIRS),
    ([40, 41, 42], GREEDY, None),
    ([40, 41, 42], SEEDED, None),
)


def constrained_greedy(reference: torch.nn.Module, prompt: list[int], max_tokens: int, table: Table) -> list[int]:
    ids: list[int] = []
    while len(ids) < max_tokens and END not in ids and not table.is_complete(ids):
        allowed = sorted(table.allowed(ids))
        if not allowed:
            break
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *ids]])).logits[0, -1]
        ids.append(allowed[int(logits[allowed].argmax())])
    return ids


def squeezed() -> Served:
    """Few blocks, so that some are preempted and their matchers go on where they were."""
    return Served(
        model("llama")[0],
        cache=CacheConfig(block_size=4, num_blocks=11),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
    )


@pytest.mark.each_value
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("make", [Replayed, squeezed])
def test_outputs_equal_transformers_held_to_their_tables_and_others_notice_nothing(
    make: Callable[[], Served], depth: int
) -> None:
    _, reference = model("llama")
    runs = []
    for tables in ({}, {f"r{number}": table for number, (_, _, table) in enumerate(ASKED) if table}):
        served = make()
        served.assembled.runner.depth = depth  # type: ignore[misc]
        served.engine.scheduler.live.constraints = ConstrainedOutputs(TableGrammars(tables), VOCAB_SIZE)
        handles = [served.add(prompt, 20, sampling, stop=(END,)) for prompt, sampling, _ in ASKED]
        served.run()
        runs.append([served.outputs[handle] for handle in handles])
    assert make is Replayed or served.engine.scheduler.num_preemptions > 0
    free, kept = runs
    for (prompt, _, table), output in list(zip(ASKED, kept, strict=True))[:3]:
        assert table is not None and output.ids == constrained_greedy(reference, prompt, 20, table)
    _, three, stuck, seeded, *others = kept
    assert [token % 4 for token in seeded.ids] == [1, 2] * 10 and seeded.ids != free[3].ids
    assert [output.ids for output in others] == [output.ids for output in free[4:]]
    assert others[0].ids == greedy(reference, ASKED[4][0], 20)
    assert three.finished is not None and three.finished.reason is FinishReason.CONSTRAINT_COMPLETE
    assert stuck.failed is not None and stuck.failed.fault.reason == "INVALID_CONSTRAINT" and len(stuck.ids) == 2
