"""Ids that cannot be sampled, by bitmasks per slot: their logits become -infinity.

    slot may sample id  iff  (its mask, behind drafts that of their number, has the id's bit, or the slot has none)
                        and  (the slot's limit has it, or the slot is not limited)
                        and  (the slot's ban has not, or context_len >= min_length of the slot)

Bit i of word w stands for id 32 w + i.

Shapes: logits float32 [R, V], changed in place; slots int64 [R], context_len int32 or int64 [R]; Constraints of S
slots, W = ⌈V / 32⌉ words. The kernel is that of `process_logits.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.jit import jit, tl


class Constraints(NamedTuple):
    """Bans, masks and limits of S slots.

    min_length: int64 [S], length from which the banned ids may be sampled; 0 where none is banned.
    banned: int32 [S, W], the bits of banned ids are set.
    mask_row: int64 [S], the row of `masks` that holds for the slot, counted from 1; 0 where none does. That of the id
        after j drafts is j rows further.
    masks: int32 [M, W], the bits of allowed ids are set.
    is_limited: int64 [S], 1 where the limit holds, for as long as the slot is taken.
    limits: int32 [S, W], as `masks`, by slot.
    """

    min_length: torch.Tensor
    banned: torch.Tensor
    mask_row: torch.Tensor
    masks: torch.Tensor
    is_limited: torch.Tensor
    limits: torch.Tensor


def reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    constraints: Constraints,
    num_before: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Return bool [R], the rows that are constrained, and change their logits; `num_before` counts drafts."""
    mask_row = constraints.mask_row[slots]
    is_masked = mask_row > 0
    mask_row = torch.where(is_masked, mask_row + num_before, mask_row)
    is_limited = constraints.is_limited[slots] > 0
    is_early = context_len < constraints.min_length[slots]
    allowed = torch.where(is_masked[:, None], constraints.masks[mask_row - 1], -1)
    allowed &= torch.where(is_limited[:, None], constraints.limits[slots], -1)
    allowed &= ~torch.where(is_early[:, None], constraints.banned[slots], 0)
    bits = (allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
    return is_masked | is_limited | is_early


@jit
def load_allowed(column, slot, length, constraints, num_columns, num_before):
    """Return which columns of a row may be sampled, and whether a ban, a limit or a mask holds for the row."""
    min_length, banned, mask_row, masks, is_limited, limits = constraints
    place = tl.load(mask_row + slot)
    limited = tl.load(is_limited + slot) > 0
    early = length < tl.load(min_length + slot)
    is_constrained = (place > 0) | limited | early
    place = tl.where(place > 0, place + num_before, place)
    inside, num_words = column < num_columns, (num_columns + 31) // 32
    word = column // 32
    bits = tl.load(masks + (place - 1) * num_words + word, mask=inside & (place > 0), other=-1)
    bits &= tl.load(limits + slot * num_words + word, mask=inside & limited, other=-1)
    bits &= ~tl.load(banned + slot * num_words + word, mask=inside & early, other=0)
    return ((bits >> (column % 32)) & 1) > 0, is_constrained
