"""The end of a step with drafts: which sampled ids are kept, and the slot table brought up to them.

    kept of a row = its first id, and each next one while the draft before it equals the id kept there

A row samples `yields` ids, one after its last known id and one after each of its `yields - 1` drafts, which stand in
`token_ids` behind the known ids. An id below 0 behind kept ones ends them: the next step meets it as its first.
Of `counts` computed tokens those of refused drafts do not count; the last kept id is stored, the others stand there.

Shapes: slots, counts, yields int64 [B], ids int64 [at least Σ yields], row after row, SlotState with num_known ->
lengths int64 [B], 0 where a row yields nothing. Slot 0 is unchanged. Bytes moved: about 40 for each row, 12 for each
id, and 4 for each kept one if it is counted.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import jit, launches, next_power_of_2, tl
from photon_grpc.kernels.sampling import penalties
from photon_grpc.kernels.sampling.penalties import Penalties
from photon_grpc.kernels.slot_state import SlotState, StepRows

#: Drafts of a row, at most.
MAX_DRAFTS = 8
#: Up to so many rows one kernel is compiled for all numbers.
ROWS = 512


def reference(
    slots: torch.Tensor,
    counts: torch.Tensor,
    yields: torch.Tensor,
    ids: torch.Tensor,
    state: SlotState,
    counted: Penalties | None = None,
) -> torch.Tensor:
    """Accept in torch; count the kept ids in `counted` if it is given."""
    token_ids, num_computed, _, num_known = state
    assert num_known is not None
    lengths, end = torch.zeros_like(yields), 0
    sampled, known = ids.tolist(), num_known[slots].tolist()
    for row, (slot, number) in enumerate(zip(slots.tolist(), yields.tolist(), strict=True)):
        start, end = end, end + number
        if not slot:
            continue
        drafts = token_ids[slot, known[row] : known[row] + number - 1].tolist() if number > 1 else []
        length = _num_kept(sampled[start:end], drafts)
        lengths[row] = length
        if length:
            place = known[row] + length - 1
            token_ids[slot, place] = max(sampled[start + length - 1], 0)
            num_computed[slot], num_known[slot] = place, place + 1
            if counted is not None:
                _count(slot, sampled[start : start + length], counted)
        else:
            num_computed[slot] += counts[row]
    return lengths


def _num_kept(sampled: list[int], drafts: list[int]) -> int:
    length = min(len(sampled), 1)
    for draft in drafts:
        if sampled[length - 1] != draft or sampled[length] < 0:
            break
        length += 1
    return length


def _count(slot: int, ids: list[int], counted: Penalties) -> None:
    slots = torch.tensor([slot], device=counted.counts.device)
    for token in ids:
        penalties.count_reference(slots, torch.ones_like(slots), torch.full_like(slots, token), counted)


@jit
def accept_kernel(
    rows, ids, state, held, lengths, token_stride, num_columns,
    ROWS_PAD: tl.constexpr, DRAFTS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Accept the ids of one row per program; `held` are the counts [S, num_columns] of ids, or None."""
    slots, counts, yields = rows
    token_ids, num_computed, _block_table, num_known = state
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    slot, number = tl.load(slots + row), tl.load(yields + row)
    other = tl.arange(0, ROWS_PAD)
    first = ids + tl.sum(tl.load(yields + other, mask=other < row, other=0), axis=0)
    known = tl.load(num_known + slot)
    place = token_ids + slot * token_stride + known
    at = tl.arange(0, DRAFTS_PAD)
    inside = at < number - 1
    draft = tl.load(place + at, mask=inside, other=-1).to(tl.int64)
    sampled = tl.load(first + at, mask=inside, other=-1)
    following = tl.load(first + at + 1, mask=inside, other=-1)
    kept = tl.min(tl.where(inside & (sampled == draft) & (following >= 0), DRAFTS_PAD, at), axis=0)
    length = tl.where((number > 0) & (slot > 0), kept + 1, 0)
    tl.store(lengths + row, length.to(tl.int64))
    if slot == 0:
        return
    if number > 0:
        tl.store(place + kept, tl.maximum(tl.load(first + kept), 0).to(tl.int32))
        tl.store(num_computed + slot, known + kept)
        tl.store(num_known + slot, known + kept + 1)
        if held is not None:
            for step in range(length):
                token = tl.load(first + step)
                if token >= 0:
                    cell = held + slot * num_columns + token
                    count = tl.load(cell).to(tl.int32)
                    # Every thread has read before one writes; an id may be kept twice.
                    tl.debug_barrier()
                    if (count & 0x7FFF) != 0x7FFF:
                        tl.store(cell, (count + 1).to(tl.int16))
                    tl.debug_barrier()
    else:
        tl.store(num_computed + slot, tl.load(num_computed + slot) + tl.load(counts + row))


def launch(
    slots: torch.Tensor,
    counts: torch.Tensor,
    yields: torch.Tensor,
    ids: torch.Tensor,
    state: SlotState,
    counted: Penalties | None = None,
) -> torch.Tensor:
    """Accept as `reference` does; only slot 0 may occur twice in `slots`."""
    if not launches(slots):
        return reference(slots, counts, yields, ids, state, counted)
    num_rows, held = slots.shape[0], None if counted is None else counted.counts
    lengths = torch.empty(num_rows, dtype=torch.int64, device=slots.device)
    num_columns = 0 if held is None else held.shape[1]
    accept_kernel[(num_rows,)](
        StepRows(slots, counts, yields), ids, state, held, lengths, state.token_ids.stride(0), num_columns,
        ROWS_PAD=max(next_power_of_2(num_rows), ROWS), DRAFTS_PAD=MAX_DRAFTS, num_warps=1,
        **dependent_launch(slots.device),
    )  # fmt: skip
    return lengths
