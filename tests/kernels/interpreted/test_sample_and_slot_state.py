"""Sampling and the slot table's kernels in the interpreter: equal to their torch references."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import slot_state
from photon_grpc.kernels.sampling import bitmask, penalties, process_logits, sample
from tests.kernels.sampling import metadata_of


def rows() -> sample.SamplingMetadata:
    """Return five rows at slots in another order."""
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5, 0.0])
    number = torch.arange(5)
    slots, lengths = torch.tensor([0, 3, 2, 1, 4]), (number * 9).int()
    return sample.SamplingMetadata(slots, lengths, temperature, number - 2, number % 2, number * 2)


def test_sampled_ids_are_equal() -> None:
    torch.manual_seed(0)
    for columns in (50, 2048, 5000):
        logits = torch.randn(5, columns) * 3
        assert torch.equal(sample.launch(logits, rows()), sample.reference(logits, rows()))


def test_ties_are_the_lowest_id_and_rows_without_finite_logits_are_invalid() -> None:
    logits = torch.zeros(5, 4100)
    logits[1, 4099] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = -float("inf")
    logits[4, [3, 4000]] = 5.0
    expected = sample.reference(logits, rows())
    assert expected.tolist() == [0, -1, -1, -1, 3]
    assert torch.equal(sample.launch(logits, rows()), expected)


def state_of(max_len: int, pages: int, num_groups: int) -> slot_state.SlotState:
    """Return a state of seven slots."""
    return slot_state.SlotState(
        torch.randint(0, 90, (7, max_len), dtype=torch.int32),
        torch.tensor([0, 5, 9, 17, 2, 3, 30]),
        torch.randint(1, 50, (7, num_groups, pages), dtype=torch.int32),
        torch.tensor([1, 6, 10, 18, 3, 4, 181]),
    )


def assert_equal_inputs(mine: slot_state.Inputs, theirs: slot_state.Inputs, lengths: torch.Tensor) -> None:
    for name, a, b in zip(mine._fields, mine, theirs, strict=True):
        if name == "block_tables":
            for row, length in enumerate(lengths.tolist()):
                assert torch.equal(a[:, row, : -(-length // 4)], b[:, row, : -(-length // 4)])
        else:
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b)), name


@pytest.mark.parametrize("num_groups", [1, 3])
def test_inputs_of_a_decode_step_are_equal(num_groups: int) -> None:
    torch.manual_seed(1)
    slots, state = torch.tensor([3, 1, 6, 0, 0]), state_of(40, 10, num_groups)
    lengths = torch.zeros(2, 5, dtype=torch.int32)
    mine = slot_state.decode_inputs(slots, lengths[0], state, 4)
    theirs = slot_state.decode_inputs_reference(slots, lengths[1], state, 4)
    assert_equal_inputs(mine, theirs, lengths[1])
    assert lengths.tolist() == [[18, 6, 31, 1, 1]] * 2
    # Kernels are compiled for places that begin at 16 bytes, also of an odd number of rows.
    assert not any((places.data_ptr() - mine.position.data_ptr()) % 16 for places in mine.slot_mapping)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_inputs_of_a_mixed_step_are_equal_and_so_is_what_it_leaves(num_groups: int) -> None:
    torch.manual_seed(2)
    slots, counts = torch.tensor([3, 1, 0, 6, 5, 0]), torch.tensor([5, 1, 0, 150, 0, 0])
    state, lengths = state_of(300, 75, num_groups), torch.zeros(2, 6, dtype=torch.int32)
    mine = slot_state.mixed_inputs(slots, counts, lengths[0], 320, state, 4)
    theirs = slot_state.mixed_inputs_reference(slots, counts, lengths[1], 320, state, 4)
    assert_equal_inputs(mine, theirs, lengths[1])
    assert torch.equal(lengths[0], lengths[1])
    ids, yields = torch.tensor([11, -1, 13, 14, 15, 16]), torch.tensor([1, 1, 0, 0, 1, 0])
    copies = [slot_state.SlotState(*(tensor.clone() for tensor in state if tensor is not None)) for _ in range(2)]
    slot_state.advance(slots, counts, yields, ids, copies[0])
    slot_state.advance_reference(slots, counts, yields, ids, copies[1])
    assert torch.equal(copies[0].token_ids[1:], copies[1].token_ids[1:])
    assert torch.equal(copies[0].num_computed, copies[1].num_computed)
    assert copies[0].num_computed.tolist() == [0, 6, 9, 22, 2, 3, 180]
    # Of rows that yield.
    assert [each.num_known.tolist() for each in copies if each.num_known is not None] == [[1, 7, 10, 23, 3, 4, 181]] * 2
    tokens = copies[0].token_ids
    assert tokens[3, 22] == 11 and tokens[1, 6] == 0 and tokens[6, 180] == state.token_ids[6, 180]


def penalised(num_columns: int) -> penalties.Penalties:
    """Return five slots: nothing, a repetition penalty, all penalties, biases, and all."""
    counts = torch.randint(-(2**15), 2**15, (5, num_columns), dtype=torch.int64).short()
    counts[:, ::3] = 0
    # In the prompt alone.
    counts[:, 1::3] = -(2**15)
    strengths = torch.tensor([[1, 1.5, 0.7, 1, 1.2], [0, 0, 1.5, 0, -1], [0, 0, -0.5, 0, 0.01]])
    ids = torch.stack([torch.randperm(num_columns)[: penalties.MAX_BIASES] for _ in range(5)]).int()
    num_biases = torch.tensor([0, 0, 0, 5, penalties.MAX_BIASES])
    return penalties.Penalties(counts, *strengths, num_biases, ids, torch.randn(5, penalties.MAX_BIASES))


NUM_COLUMNS, NUM_WORDS = 2500, 79
LENGTHS = torch.tensor([9, 5, 1, 9, 9, 9], dtype=torch.int32)


def constrained() -> bitmask.Constraints:
    """Return five slots: nothing, banned and limited, masked, banned and masked, nothing."""
    words = torch.randint(-(2**31), 2**31, (3, 5, NUM_WORDS), dtype=torch.int64).int()
    early, mask_row, limited = (torch.tensor(each) for each in ([0, 8, 9, 10, 9], [0, 0, 2, 1, 0], [0, 1, 0, 0, 0]))
    return bitmask.Constraints(early, words[0], mask_row, words[1, :3], limited, words[2])


def test_constraints_leave_out_what_their_bits_say() -> None:
    torch.manual_seed(3)
    slots, constraints = torch.tensor([3, 1, 0, 2, 4, 0]), constrained()
    logits = torch.randn(6, NUM_COLUMNS)
    is_constrained = bitmask.reference(logits, slots, LENGTHS, constraints)
    assert is_constrained.tolist() == [True, True, False, True, False, False]

    def has(words: torch.Tensor, row: int, token: int) -> bool:
        return bool(int(words[row, token // 32]) >> token % 32 & 1)

    for row, slot in enumerate(slots.tolist()):
        for token in (0, 31, 32, 63, 777, 2499):
            is_out = slot in (1, 3) and has(constraints.banned, slot, token)
            is_out |= slot == 1 and not has(constraints.limits, slot, token)
            is_out |= slot in (2, 3) and not has(constraints.masks, {2: 1, 3: 0}[slot], token)
            assert bool(logits[row, token] == -torch.inf) == is_out


def test_processed_logits_are_equal() -> None:
    torch.manual_seed(4)
    processing, slots = (
        process_logits.LogitsProcessing(penalised(NUM_COLUMNS), constrained()),
        torch.tensor([3, 1, 0, 2, 4, 0]),
    )
    # Rows lie apart.
    logits = torch.randn(6, NUM_COLUMNS + 7)[:, :NUM_COLUMNS] * 5
    mine, theirs = torch.empty(6, NUM_COLUMNS + 7)[:, :NUM_COLUMNS].copy_(logits), logits.clone()
    is_constrained = process_logits.launch(mine, slots, LENGTHS, processing)
    assert torch.equal(is_constrained, process_logits.reference(theirs, slots, LENGTHS, processing))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-4)
    assert torch.equal(mine[2], logits[2]) and torch.equal(mine[5], logits[5])
    assert not torch.equal(mine[4], logits[4]) and mine[4].isfinite().all()


def test_samples_of_processed_logits_are_equal() -> None:
    torch.manual_seed(5)
    processing, slots = (
        process_logits.LogitsProcessing(penalised(NUM_COLUMNS), constrained()),
        torch.tensor([3, 1, 0, 2, 4, 0]),
    )
    number = torch.arange(5)
    temperature = torch.tensor([0.0, 0.7, 1.0, 0.0, 2.5])
    metadata = sample.SamplingMetadata(slots, LENGTHS, temperature, number - 2, number % 2, number)
    for _ in range(3):
        logits = torch.randn(6, NUM_COLUMNS) * 5
        expected = sample.reference(logits.clone(), metadata, processing)
        assert torch.equal(sample.launch(logits.clone(), metadata, processing), expected)
        assert not torch.equal(expected, sample.reference(logits, metadata))


def test_rows_that_may_sample_nothing_are_told_from_those_whose_logits_are_not_finite() -> None:
    processing, slots = (
        process_logits.LogitsProcessing(penalised(NUM_COLUMNS), constrained()),
        torch.tensor([3, 1, 0, 2, 4, 2]),
    )
    processing.penalties.num_biases.zero_()
    processing.constraints.masks[:2] = 0
    logits = torch.randn(6, NUM_COLUMNS)
    logits[1, 5], logits[4] = float("nan"), -float("inf")
    # Bit 5 of what slot 1 is limited to, and banned from.
    processing.constraints.limits[1, 0], processing.constraints.banned[1, 0] = -1, 0
    metadata = rows()._replace(slots=slots, context_len=LENGTHS)
    expected = sample.reference(logits.clone(), metadata, processing)
    assert [min(int(number), 0) for number in expected] == [sample.NOTHING, sample.INVALID, 0, sample.NOTHING, -1, -2]
    assert torch.equal(sample.launch(logits.clone(), metadata, processing), expected)
    # A NaN that may not be sampled is no failure.
    processing.constraints.limits[1, 0] = ~(1 << 5)
    assert sample.launch(logits.clone(), metadata, processing)[1] >= 0


def test_sampled_ids_are_counted_alike() -> None:
    state = penalised(2500)
    state.counts[2, 7], state.counts[3, 8] = 0x7FFF, -1
    slots, yields = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 1, 1, 1, 0, 1])
    ids, copies = torch.tensor([5, -1, 7, 8, 9, 5]), (state.counts.clone(), state.counts.clone())
    penalties.count(slots, yields, ids, state._replace(counts=copies[0]))
    penalties.count_reference(slots, yields, ids, state._replace(counts=copies[1]))
    assert torch.equal(*copies) and torch.equal(copies[0], state.counts)
    penalties.count(torch.tensor([4, 3]), torch.tensor([1, 1]), torch.tensor([9, 9]), state)
    assert state.counts[4, 9] == copies[0][4, 9] + 1 and state.counts[3, 9] == copies[0][3, 9] + 1


@pytest.mark.parametrize("cut", [2048, 4096])
def test_the_best_of_parts_of_the_ids_is_that_of_all(cut: int) -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(3))
    logits[1, 17] = float("nan")
    logits[2, 4900] = float("inf")
    logits[3] = -float("inf")
    # Of equal values the lowest id wins, whichever part has it.
    logits[4, [3, 4321]] = 9.0
    metadata = metadata_of(torch.tensor([0.0, 0.7, 0.0, 1.1, 0.0, 1.3]))
    parts = logits[:, :cut].contiguous(), logits[:, cut:].contiguous()
    for best_of in (sample.best_launch, sample.best_reference):
        found = [best_of(part, metadata, first) for part, first in zip(parts, (0, cut), strict=True)]
        joined = sample.TileBest(*(torch.cat(each, 1) for each in zip(*(part[:3] for part in found), strict=True)))
        for merge in (sample.merge, sample.merge_reference):
            assert torch.equal(merge(joined), sample.reference(logits, metadata))
