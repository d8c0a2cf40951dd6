"""Prompt lookup: the ids that followed, earlier in the same sequence, what its newest ids are (Saxena 2023).

    draft j = ids[p + 1 + j mod (n - 1 - p)],   p < n - 1 the newest position with the longest match
    match of p = how many of ids[p], ids[p - 1] … equal ids[n - 1], ids[n - 2] …, at most 4, at least 2

n known ids; where the copy reaches the newest id it begins again, so a loop is drafted on. Without a match the drafts
are id 0, which costs nothing more than to refuse it.

Shapes: slots, num_drafts int64 [B], SlotState with num_known; token_ids[slot, n + j] is written for each j <
num_drafts. Bytes moved: 4 · n for each row.
"""

from __future__ import annotations

import numpy as np
import torch

from photon_grpc.kernels.lang.jit import jit, launches, tl
from photon_grpc.kernels.slot_state import SlotState

MAX_MATCH, MIN_MATCH = 4, 2
LONGEST = MAX_MATCH if tl is None else tl.constexpr(MAX_MATCH)
SHORTEST = MIN_MATCH if tl is None else tl.constexpr(MIN_MATCH)


def reference(slots: torch.Tensor, num_drafts: torch.Tensor, state: SlotState) -> None:
    """Draft in torch."""
    assert state.num_known is not None
    known = state.num_known[slots].tolist()
    for slot, count, n in zip(slots.tolist(), num_drafts.tolist(), known, strict=True):
        row = state.token_ids[slot]
        drafts = proposed(row[:n].cpu().numpy(), count)
        row[n : n + count] = torch.tensor(drafts, dtype=torch.int32, device=row.device)


def proposed(ids: np.ndarray, count: int) -> list[int]:
    """Return the drafts behind these ids."""
    last = len(ids) - 1
    is_equal, matched = np.ones(max(last, 0), dtype=bool), np.zeros(max(last, 0), dtype=np.int64)
    for back in range(min(MAX_MATCH, last)):
        is_equal[:back] = False
        is_equal[back:] &= ids[: last - back] == ids[last - back]
        matched += is_equal
    if last < 1 or matched.max() < MIN_MATCH:
        return [0] * count
    position = int(np.flatnonzero(matched == matched.max())[-1])
    return [int(ids[position + 1 + at % (last - position)]) for at in range(count)]


@jit
def ngram_kernel(slots, num_drafts, state, token_stride, DRAFTS_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Draft for one row per program."""
    token_ids, _num_computed, _block_table, num_known = state
    row = tl.program_id(0)
    slot, count = tl.load(slots + row), tl.load(num_drafts + row)
    known = tl.load(num_known + slot)
    ids = token_ids + slot * token_stride
    last = known - 1
    # The length of a match, then its position: the longest is best, then the newest. No load waits for another.
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, last, BLOCK):
        position = start + tl.arange(0, BLOCK)
        is_equal = position < last
        matched = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(LONGEST):
            newest = tl.load(ids + last - back, mask=last >= back, other=-1)
            is_equal &= tl.load(ids + position - back, mask=(position >= back) & (position < last), other=-2) == newest
            matched += is_equal.to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= SHORTEST, (matched << 32) + position, -1))
    best = tl.max(best, axis=0)
    at = tl.arange(0, DRAFTS_PAD)
    position = best & 0xFFFFFFFF
    period = tl.maximum(last - position, 1)
    found = (at < count) & (best >= 0)
    draft = tl.load(ids + position + 1 + at % period, mask=found, other=0)
    tl.store(ids + known + at, draft, mask=at < count)


def launch(slots: torch.Tensor, num_drafts: torch.Tensor, state: SlotState) -> None:
    """Draft as `reference` does."""
    if not launches(slots):
        reference(slots, num_drafts, state)
        return
    ngram_kernel[(slots.shape[0],)](
        slots, num_drafts, state, state.token_ids.stride(0), DRAFTS_PAD=8, BLOCK=1024, num_warps=4,
    )  # fmt: skip
