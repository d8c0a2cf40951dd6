"""The kernels of steps with drafts in the interpreter: equal to their torch references, and to the rule in words."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import accept, ngram
from photon_grpc.kernels.sampling import bitmask, penalties, process_logits
from photon_grpc.kernels.slot_state import SlotState

NUM_SLOTS, MAX_LEN, NUM_COLUMNS = 7, 64, 300


def state_of(known: list[int]) -> SlotState:
    num_known = torch.tensor(known)
    tokens = torch.randint(0, 4, (NUM_SLOTS, MAX_LEN), dtype=torch.int32)
    return SlotState(tokens, num_known - 1, torch.zeros(NUM_SLOTS, 1, 8, dtype=torch.int32), num_known)


def copied(state: SlotState) -> SlotState:
    return SlotState(*(None if each is None else each.clone() for each in state))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_accepted_ids_are_equal(seed: int) -> None:
    torch.manual_seed(seed)
    state = state_of([1, 9, 4, 17, 30, 2, 40])
    # A row inside a prompt, one at its end, and rows with 1 to 7 drafts; slot 0 fills up.
    slots, counts = torch.tensor([3, 1, 6, 2, 5, 4, 0, 0]), torch.tensor([8, 5, 9, 2, 4, 8, 3, 0])
    yields = torch.tensor([8, 1, 0, 2, 4, 8, 3, 0])
    state.num_computed[1], state.num_computed[6] = 9 - 5, 20
    ids = torch.randint(0, 4, (int(yields.sum()),))
    # All of one row are right; an id that cannot be sampled stands first in another, and behind kept ones in a third.
    ids[:7], ids[7] = state.token_ids[3, 17:24], 2
    ids[9] = -1
    ids[11:13], ids[13] = state.token_ids[5, 2:4], -2
    counted = penalties.Penalties(torch.zeros(NUM_SLOTS, NUM_COLUMNS, dtype=torch.int16), *[torch.zeros(1)] * 6)
    counted.counts[3, 2] = 0x7FFF
    mine, theirs = (copied(state), counted._replace(counts=counted.counts.clone())), (copied(state), counted)
    lengths = accept.launch(slots, counts, yields, ids, *mine)
    assert torch.equal(lengths, accept.reference(slots, counts, yields, ids, *theirs))
    for one, other in zip(mine[0], theirs[0], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(mine[1].counts, counted.counts)
    assert lengths[[0, 1, 2, 3, 4, 6, 7]].tolist() == [8, 1, 0, 1, 2, 0, 0]
    assert mine[0].num_computed[[3, 1, 6]].tolist() == [17 + 7, 9, 29] and mine[0].num_known[3] == 25  # type: ignore[index]
    assert mine[0].token_ids[3, 24] == 2 and int(mine[1].counts[3].sum()) - 0x7FFF + (ids[:8] == 2).sum() == 8


@pytest.mark.parametrize("seed", range(4))
def test_looked_up_drafts_are_equal(seed: int) -> None:
    torch.manual_seed(seed)
    state = state_of([1, 9, 1, 17, 55, 2, 40])
    slots, numbers = torch.tensor([3, 1, 2, 5, 4, 6]), torch.tensor([7, 3, 2, 1, 7, 0])
    mine, theirs = copied(state), copied(state)
    ngram.launch(slots, numbers, mine)
    ngram.reference(slots, numbers, theirs)
    assert torch.equal(mine.token_ids, theirs.token_ids)


def test_drafts_follow_the_longest_and_newest_match_and_go_round() -> None:
    state = state_of([1, 12, 6, 1, 1, 1, 1])
    state.token_ids[1, :12] = torch.tensor([5, 6, 7, 8, 9, 7, 8, 1, 2, 6, 7, 8])
    state.token_ids[2, :6] = torch.tensor([3, 1, 2, 1, 2, 1])
    ngram.launch(torch.tensor([1, 2]), torch.tensor([3, 5]), state)
    assert state.token_ids[1, 12:15].tolist() == [9, 7, 8]
    assert state.token_ids[2, 6:11].tolist() == [2, 1, 2, 1, 2]


def test_positions_behind_drafts_are_processed_as_if_these_were_output() -> None:
    torch.manual_seed(3)
    state = state_of([1, 9, 4, 17, 30, 2, 40])
    counts = torch.zeros(NUM_SLOTS, NUM_COLUMNS, dtype=torch.int16)
    counts[3, 1], counts[3, 2], counts[3, 3] = 5, -(2**15), 0x7FFF
    strengths = torch.ones(3, NUM_SLOTS) * torch.tensor([[1.3], [0.5], [0.25]])
    none, no_ids = torch.zeros(NUM_SLOTS, dtype=torch.int64), torch.zeros(NUM_SLOTS, 1024, dtype=torch.int32)
    words = torch.randint(-(2**31), 2**31, (8, 10), dtype=torch.int64).int()
    mask_row = none.clone()
    mask_row[3] = 2
    held = penalties.Penalties(counts, *strengths, none, no_ids, no_ids.float())
    allowed = bitmask.Constraints(none, words[:NUM_SLOTS], mask_row, words, none, words[:NUM_SLOTS])
    drafted = penalties.Drafted(state.num_known, state.token_ids, MAX_LEN)  # type: ignore[arg-type]
    slots, lengths = torch.tensor([3, 3, 3, 5]), torch.tensor([17, 18, 20, 1], dtype=torch.int32)
    logits = torch.randn(4, NUM_COLUMNS)
    mine, theirs, counted = logits.clone(), logits.clone(), logits.clone()
    processing = process_logits.LogitsProcessing(held, allowed, drafted)
    process_logits.launch(mine, slots, lengths, processing)
    process_logits.reference(theirs, slots, lengths, processing)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-5)
    # As if the drafts before had been sampled.
    for row, number in enumerate((0, 1, 3)):
        before = counts.clone()
        for token in state.token_ids[3, 17 : 17 + number].tolist():
            one = torch.tensor([3])
            penalties.count_reference(one, one, torch.tensor([token]), held._replace(counts=before))
        rows = mask_row + number * (mask_row > 0)
        plain = process_logits.LogitsProcessing(held._replace(counts=before), allowed._replace(mask_row=rows))
        process_logits.reference(counted[row : row + 1], slots[:1], lengths[:1], plain)
    torch.testing.assert_close(theirs[:3], counted[:3])
