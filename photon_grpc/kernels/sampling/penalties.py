"""Biases added to raw logits, penalties for ids that the context holds.

    x += bias                                       of each id that has one
    x  = x / r  where x > 0,  x · r  elsewhere      of ids in prompt or output (Keskar et al. 2019)
    x -= f · count(output) + p                      of ids in the output

r: repetition penalty; f: frequency, p: presence penalty. Of an int16 count the highest bit says that the id stands in
the prompt, the others how often it stands in the output (32,767 at most).

Shapes: logits float32 [R, V], changed in place; slots int64 [R]; Penalties of S slots. Bytes moved: 2 · V and what is
changed for each row that is penalised, 16 for each bias; nothing for others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from photon_grpc.kernels.jit import cdiv, jit, launches, tl

#: Ids of one request that may have a bias.
MAX_BIASES = 1024
_MOST = 0x7FFF


class Penalties(NamedTuple):
    """Of S slots.

    counts: int16 [S, V]; only those of slots that are penalised mean something. repetition, presence, frequency:
    float32 [S]; 1, 0, 0 where a slot is not penalised. num_biases: int64 [S]. bias_ids: int32 [S, MAX_BIASES], each id
    once; biases: float32 [S, MAX_BIASES].
    """

    counts: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    num_biases: torch.Tensor
    bias_ids: torch.Tensor
    biases: torch.Tensor


def counted(prompt: npt.ArrayLike, output: npt.ArrayLike, vocab_size: int) -> npt.NDArray[np.int16]:
    """The counts [V] of a context."""
    counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=vocab_size).clip(max=_MOST).astype(np.uint16)
    counts[np.asarray(prompt, dtype=np.int64)] |= 0x8000
    return counts.view(np.int16)


def reference(logits: torch.Tensor, slots: torch.Tensor, penalties: Penalties) -> None:
    """In torch."""
    counts, repetition, presence, frequency, num_biases, bias_ids, biases = penalties
    for row, number in enumerate(num_biases[slots].tolist()):
        slot = slots[row]
        logits[row].index_add_(0, bias_ids[slot, :number].long(), biases[slot, :number])
    is_penalised = (repetition != 1) | (presence != 0) | (frequency != 0)
    for row in is_penalised[slots].nonzero()[:, 0].tolist():
        slot, x = slots[row], logits[row]
        held = counts[slot]
        count = (held & _MOST).float()
        repeated = torch.where(x > 0, x / repetition[slot], x * repetition[slot])
        changed = repeated - (frequency[slot] * count + presence[slot] * (count > 0))
        logits[row] = torch.where(held != 0, changed, x)


def count_reference(slots: torch.Tensor, yields: torch.Tensor, ids: torch.Tensor, penalties: Penalties) -> None:
    """Counts the drawn ids [R] of rows that yield, in torch. Slot 0 and ids below 0 are left out."""
    counts = penalties.counts
    is_counted = (yields > 0) & (ids >= 0) & (slots > 0)
    where = slots[is_counted], ids[is_counted]
    held = counts[where]
    counts[where] = torch.where((held & _MOST) == _MOST, held, held + 1)


@jit
def bias_kernel(logits, slots, penalties, stride, BLOCK: tl.constexpr):
    """One program a row. A slot has BLOCK places for biases."""
    _counts, _repetition, _presence, _frequency, num_biases, bias_ids, biases = penalties
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    number = tl.load(num_biases + slot)
    if number > 0:
        at = tl.arange(0, BLOCK)
        inside = at < number
        token = tl.load(bias_ids + slot * BLOCK + at, mask=inside, other=0)
        bias = tl.load(biases + slot * BLOCK + at, mask=inside, other=0.0)
        place = logits + row * stride + token
        tl.store(place, tl.load(place, mask=inside, other=0.0) + bias, mask=inside)


@jit
def penalise_kernel(logits, slots, penalties, num_columns, stride, BLOCK: tl.constexpr):
    """One program for BLOCK columns of one row."""
    counts, repetition, presence, frequency, _num_biases, _bias_ids, _biases = penalties
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    r, p, f = tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot)
    if (r != 1.0) | (p != 0.0) | (f != 0.0):
        column = tile * BLOCK + tl.arange(0, BLOCK)
        held = tl.load(counts + slot * num_columns + column, mask=column < num_columns, other=0).to(tl.int32)
        is_seen = held != 0
        count = (held & 0x7FFF).to(tl.float32)
        place = logits + row * stride + column
        x = tl.load(place, mask=is_seen, other=0.0)
        repeated = tl.where(x > 0, tl.div_rn(x, r), x * r)
        tl.store(place, repeated - (f * count + tl.where(count > 0, p, 0.0)), mask=is_seen)


@jit
def count_kernel(slots, yields, ids, counts, num_columns):
    """One program a row. Slots of no penalised sequence are counted, too: nothing reads them."""
    row = tl.program_id(0)
    slot, token = tl.load(slots + row), tl.load(ids + row)
    if (slot > 0) & (token >= 0) & (tl.load(yields + row) > 0):
        place = counts + slot * num_columns + token
        held = tl.load(place).to(tl.int32)
        if (held & 0x7FFF) != 0x7FFF:
            tl.store(place, (held + 1).to(tl.int16))


def launch(logits: torch.Tensor, slots: torch.Tensor, penalties: Penalties) -> None:
    """As `reference`. Rows of `logits` may be strided, columns not."""
    if not launches(logits):
        reference(logits, slots, penalties)
        return
    num_rows, num_columns = logits.shape
    if num_rows:
        stride = logits.stride(0)
        bias_kernel[(num_rows,)](logits, slots, tuple(penalties), stride, BLOCK=MAX_BIASES, num_warps=4)
        grid = num_rows, cdiv(num_columns, 2048)
        penalise_kernel[grid](logits, slots, tuple(penalties), num_columns, stride, BLOCK=2048, num_warps=4)


def count(slots: torch.Tensor, yields: torch.Tensor, ids: torch.Tensor, penalties: Penalties) -> None:
    """As `count_reference`; no slot but 0 may stand twice in `slots`."""
    if not launches(ids):
        count_reference(slots, yields, ids, penalties)
        return
    if slots.shape[0]:
        counts = penalties.counts
        count_kernel[(slots.shape[0],)](slots, yields, ids, counts, counts.shape[1], num_warps=1)
