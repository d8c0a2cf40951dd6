"""Biases added to raw logits, penalties for ids that the context holds.

    x += bias                                       of each id that has one
    x  = x / r  where x > 0,  x · r  elsewhere      of ids in prompt or output (Keskar et al. 2019)
    x -= f · count(output) + p                      of ids in the output

r: repetition penalty; f: frequency, p: presence penalty. Of an int16 count the highest bit says that the id stands in
the prompt, the others how often it stands in the output (32,767 at most).

Shapes: logits float32 [R, V], changed in place; slots int64 [R]; Penalties of S slots. The kernel is that of
`process_logits.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import jit, launches, tl

#: Ids of one request that may have a bias.
MAX_BIASES = 1024
BIASES = MAX_BIASES if tl is None else tl.constexpr(MAX_BIASES)
_MOST = 0x7FFF


class Drafted(NamedTuple):
    """The ids that stand before a sampled position without being known: drafts.

    num_known: int64 [S], ids known of every slot. token_ids: int32 [S, stride], the drafts behind them. A position
    with `context_len` ids before it has `context_len - num_known` drafts among them, if that is above 0.
    """

    num_known: torch.Tensor
    token_ids: torch.Tensor
    stride: int


class Penalties(NamedTuple):
    """Penalties and biases of S slots.

    counts: int16 [S, V]; only those of penalised slots have a meaning. repetition, presence, frequency:
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
    """Return the counts [V] of a context."""
    counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=vocab_size).clip(max=_MOST).astype(np.uint16)
    counts[np.asarray(prompt, dtype=np.int64)] |= 0x8000
    return counts.view(np.int16)


def num_drafts(slots: torch.Tensor, context_len: torch.Tensor, drafted: Drafted | None) -> torch.Tensor:
    """Return int64 [R], the drafts before each position, in torch."""
    if drafted is None:
        return torch.zeros_like(slots)
    return (context_len - drafted.num_known[slots]).clamp(min=0)


def reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    penalties: Penalties,
    context_len: torch.Tensor | None = None,
    drafted: Drafted | None = None,
) -> None:
    """Apply biases and penalties in torch; drafts before a position count as output."""
    counts, repetition, presence, frequency, num_biases, bias_ids, biases = penalties
    for row, number in enumerate(num_biases[slots].tolist()):
        slot = slots[row]
        logits[row].index_add_(0, bias_ids[slot, :number].long(), biases[slot, :number])
    is_penalised = (repetition != 1) | (presence != 0) | (frequency != 0)
    for row in is_penalised[slots].nonzero()[:, 0].tolist():
        slot, x = slots[row], logits[row]
        held = counts[slot]
        if drafted is not None and context_len is not None:
            held = _with_drafts(held, slot, context_len[row], drafted)
        count = (held & _MOST).float()
        repeated = torch.where(x > 0, x / repetition[slot], x * repetition[slot])
        changed = repeated - (frequency[slot] * count + presence[slot] * (count > 0))
        logits[row] = torch.where(held != 0, changed, x)


def _with_drafts(held: torch.Tensor, slot: torch.Tensor, length: torch.Tensor, drafted: Drafted) -> torch.Tensor:
    known = int(drafted.num_known[slot])
    drafts = drafted.token_ids[slot, known : max(int(length), known)].long()
    count = ((held & _MOST).int() + torch.bincount(drafts, minlength=held.shape[0]).int()).clamp(max=_MOST)
    return torch.where(held < 0, count - 0x8000, count).short()


def count_reference(slots: torch.Tensor, yields: torch.Tensor, ids: torch.Tensor, penalties: Penalties) -> None:
    """Count the sampled ids [R] of rows that yield, in torch; skip slot 0 and ids below 0."""
    counts = penalties.counts
    is_counted = (yields > 0) & (ids >= 0) & (slots > 0)
    where = slots[is_counted], ids[is_counted]
    held = counts[where]
    counts[where] = torch.where((held & _MOST) == _MOST, held, held + 1)


@jit
def add_biases(logits, column, slot, penalties, num_columns):
    """Add biases in memory to the columns of the row at `logits`; other programs' columns are not touched."""
    number = tl.load(penalties.num_biases + slot)
    if number > 0:
        first, last = tl.min(column, axis=0), tl.max(column, axis=0)
        at = tl.arange(0, BIASES)
        token = tl.load(penalties.bias_ids + slot * BIASES + at, mask=at < number, other=-1)
        has_bias = (token >= first) & (token <= last) & (token < num_columns)
        bias = tl.load(penalties.biases + slot * BIASES + at, mask=has_bias, other=0.0)
        tl.store(logits + token, tl.load(logits + token, mask=has_bias, other=0.0) + bias, mask=has_bias)
        # One thread reads what another has written.
        tl.debug_barrier()


@jit
def num_drafts_before(slot, length, drafted):
    """Return the drafts before a position with `length` ids before it."""
    if drafted is None:
        return 0
    else:
        return tl.maximum(length - tl.load(drafted.num_known + slot), 0)


@jit
def load_penalised(logits, column, slot, processing, num_columns, num_before):
    """Load float32 columns of the row that `logits` points to; -infinity past the last.

    `processing` is a LogitsProcessing; `num_before` counts the drafts before the position.
    """
    penalties, _constraints, drafted = processing
    x = tl.load(logits + column, mask=column < num_columns, other=-float("inf")).to(tl.float32)
    r = tl.load(penalties.repetition + slot)
    p, f = tl.load(penalties.presence + slot), tl.load(penalties.frequency + slot)
    if (r != 1.0) | (p != 0.0) | (f != 0.0):
        held = tl.load(penalties.counts + slot * num_columns + column, mask=column < num_columns, other=0).to(tl.int32)
        if drafted is not None:
            first = drafted.token_ids + slot * drafted.stride + tl.load(drafted.num_known + slot)
            extra = tl.zeros_like(held)
            for at in range(num_before):
                extra += (column == tl.load(first + at)).to(tl.int32)
            held = (held & 0x8000) | tl.minimum((held & 0x7FFF) + extra, 0x7FFF)
        count = (held & 0x7FFF).to(tl.float32)
        repeated = tl.where(x > 0, tl.div_rn(x, r), x * r)
        x = tl.where(held != 0, repeated - tl.fma(f, count, tl.where(count > 0, p, 0.0)), x)
    return x


@jit
def count_kernel(slots, yields, ids, counts, num_columns, PDL: tl.constexpr):
    """Count the id of one row per program, also for slots without penalties, whose counts nothing reads."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    slot, token = tl.load(slots + row), tl.load(ids + row)
    if (slot > 0) & (token >= 0) & (tl.load(yields + row) > 0):
        place = counts + slot * num_columns + token
        held = tl.load(place).to(tl.int32)
        if (held & 0x7FFF) != 0x7FFF:
            tl.store(place, (held + 1).to(tl.int16))


def count(slots: torch.Tensor, yields: torch.Tensor, ids: torch.Tensor, penalties: Penalties) -> None:
    """Count as `count_reference` does; only slot 0 may occur twice in `slots`."""
    if not launches(ids):
        count_reference(slots, yields, ids, penalties)
        return
    if slots.shape[0]:
        counts = penalties.counts
        options = dependent_launch(slots.device)
        count_kernel[(slots.shape[0],)](slots, yields, ids, counts, counts.shape[1], num_warps=1, **options)
