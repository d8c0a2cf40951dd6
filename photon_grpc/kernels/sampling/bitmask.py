"""Ids that cannot be drawn, by bitmasks per slot: their logits become -infinity.

    slot may draw id  iff  (mask of the slot has the id's bit, or the slot is not masked)
                      and  (the slot's limit has it, or the slot is not limited)
                      and  (the slot's ban has not, or context_len >= min_length of the slot)

Bit i of word w stands for id 32 w + i.

Shapes: logits float32 [R, V], changed in place; slots int64 [R], context_len int32 or int64 [R]; Constraints of S
slots, W = ⌈V / 32⌉ words. Bytes moved: V / 8 for each bitmask that holds for a row, and what is written; else nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.jit import cdiv, jit, launches, tl


class Constraints(NamedTuple):
    """Of S slots.

    min_length: int64 [S], length from which the banned ids may be drawn; 0 where none is banned.
    banned: int32 [S, W], the bits of banned ids are set.
    is_masked: int64 [S], 1 where the mask holds.
    masks: int32 [S, W], the bits of allowed ids are set.
    is_limited, limits: the same for as long as the slot is taken.
    """

    min_length: torch.Tensor
    banned: torch.Tensor
    is_masked: torch.Tensor
    masks: torch.Tensor
    is_limited: torch.Tensor
    limits: torch.Tensor


def reference(
    logits: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, constraints: Constraints
) -> torch.Tensor:
    """bool [R], rows that are constrained; their logits are changed."""
    is_masked = constraints.is_masked[slots] > 0
    is_limited = constraints.is_limited[slots] > 0
    is_early = context_len < constraints.min_length[slots]
    allowed = torch.where(is_masked[:, None], constraints.masks[slots], -1)
    allowed &= torch.where(is_limited[:, None], constraints.limits[slots], -1)
    allowed &= ~torch.where(is_early[:, None], constraints.banned[slots], 0)
    bits = (allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
    return is_masked | is_limited | is_early


@jit
def bitmask_kernel(
    logits, slots, context_len, constraints, is_constrained, num_columns, stride, num_words, BLOCK: tl.constexpr
):  # fmt: skip
    """One program for BLOCK columns of one row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    min_length, banned, is_masked, masks, is_limited, limits = constraints
    slot = tl.load(slots + row)
    masked = tl.load(is_masked + slot) > 0
    limited = tl.load(is_limited + slot) > 0
    early = tl.load(context_len + row) < tl.load(min_length + slot)
    if tile == 0:
        tl.store(is_constrained + row, (masked | limited | early).to(tl.int8))
    if masked | limited | early:
        column = tile * BLOCK + tl.arange(0, BLOCK)
        inside = column < num_columns
        word = slot * num_words + column // 32
        allowed = tl.load(masks + word, mask=inside & masked, other=-1)
        allowed &= tl.load(limits + word, mask=inside & limited, other=-1)
        allowed &= ~tl.load(banned + word, mask=inside & early, other=0)
        is_out = ((allowed >> (column % 32)) & 1) == 0
        tl.store(logits + row * stride + column, -float("inf"), mask=inside & is_out)


def launch(
    logits: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, constraints: Constraints
) -> torch.Tensor:
    """As `reference`. Rows of `logits` may be strided, columns not."""
    if not launches(logits):
        return reference(logits, slots, context_len, constraints)
    num_rows, num_columns = logits.shape
    is_constrained = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    if num_rows:
        bitmask_kernel[(num_rows, cdiv(num_columns, 1024))](
            logits, slots, context_len, tuple(constraints), is_constrained,
            num_columns, logits.stride(0), constraints.masks.shape[1], BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return is_constrained.bool()
