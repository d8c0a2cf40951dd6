"""The logits that are sampled from: `penalties.py`, then `bitmask.py`.

Shapes: logits float32 [R, V], changed in place; slots int64 [R], context_len int32 or int64 [R]; LogitsProcessing of S
slots -> bool [R], rows for which a ban, a limit or a mask holds. Bytes moved: the logits twice, 2 · V for each row with
penalties, V / 8 for each bitmask that holds for a row, 8 for each bias.

`sample.py` processes the logits that it samples from in the same way, without writing them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.sampling import bitmask, penalties
from photon_grpc.kernels.sampling.bitmask import Constraints, load_allowed
from photon_grpc.kernels.sampling.penalties import (
    Drafted,
    Penalties,
    add_biases,
    load_penalised,
    num_drafts_before,
)


class LogitsProcessing(NamedTuple):
    """Penalties and constraints of S slots; `drafted` only where positions may stand behind drafts."""

    penalties: Penalties
    constraints: Constraints
    drafted: Drafted | None = None


def reference(
    logits: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, processing: LogitsProcessing
) -> torch.Tensor:
    """Process logits in torch."""
    drafted = processing.drafted
    penalties.reference(logits, slots, processing.penalties, context_len, drafted)
    num_before = penalties.num_drafts(slots, context_len, drafted)
    return bitmask.reference(logits, slots, context_len, processing.constraints, num_before)


@jit
def load_processed(logits, column, slot, length, processing, num_columns):
    """Load processed float32 columns of the row at `logits`, and whether a ban, limit or mask holds for it."""
    of_penalties, constraints, drafted = processing
    num_before = num_drafts_before(slot, length, drafted)
    add_biases(logits, column, slot, of_penalties, num_columns)
    logit = load_penalised(logits, column, slot, processing, num_columns, num_before)
    allowed, is_constrained = load_allowed(column, slot, length, constraints, num_columns, num_before)
    return tl.where(allowed, logit, -float("inf")), is_constrained


@jit
def process_kernel(
    logits, slots, context_len, processing, is_constrained, num_columns, stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Process BLOCK columns of one row per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    slot, length = tl.load(slots + row), tl.load(context_len + row)
    logit, constrained = load_processed(logits + row * stride, column, slot, length, processing, num_columns)
    tl.store(logits + row * stride + column, logit, mask=column < num_columns)
    if tile == 0:
        tl.store(is_constrained + row, constrained)


def config() -> dict[str, Any]:
    """Return the compile-time arguments of `process_kernel`."""
    return {"BLOCK": 2048, "num_warps": 4}


def launch(
    logits: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, processing: LogitsProcessing
) -> torch.Tensor:
    """Process logits as `reference` does; rows of `logits` may be strided, columns not."""
    if not launches(logits):
        return reference(logits, slots, context_len, processing)
    num_rows, num_columns = logits.shape
    meta: dict[str, Any] = config() | dependent_launch(logits.device)
    is_constrained = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        grid = num_rows, cdiv(num_columns, meta["BLOCK"])
        numbers = num_columns, logits.stride(0)
        process_kernel[grid](logits, slots, context_len, processing, is_constrained, *numbers, **meta)
    return is_constrained
