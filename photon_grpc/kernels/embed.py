"""Rows of an embedding table, as the first kernel of a chain: h[t] = factor · table[token_ids[t]], and their squares.

The sums of squares are those of the rounded rows.

Shapes: table [V, H], token_ids [M] int32 or int64, below V -> h [M, H], partial [M, H / 16] (squares.py). bf16, fp16,
fp32.
Bytes moved: 2 · M · H · itemsize.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.lang.squares import group_sums


def reference(
    table: torch.Tensor, token_ids: torch.Tensor, h: torch.Tensor, partial: torch.Tensor, factor: float | None = None
) -> None:
    """Fill h and partial in torch."""
    h.copy_(table[token_ids] if factor is None else table[token_ids] * factor)
    partial.copy_(squares.reference(h))


@jit
def embed_kernel(table, token_ids, h, partial, factor, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy BLOCK columns of one row per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    source = tl.load(token_ids + row).to(tl.int64) * SIZE + column
    found = tl.load(table + source, mask=inside, other=0.0)
    if factor is not None:
        found = (found.to(tl.float32) * factor).to(found.dtype)
    tl.store(h + row * SIZE + column, found, mask=inside)
    group = tl.program_id(1) * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
    x = found.to(tl.float32)
    tl.store(partial + row * (SIZE // 16) + group, group_sums(x * x), mask=group < SIZE // 16)


def config(size: int) -> dict[str, Any]:
    """Return the compile-time arguments for rows of `size` columns, all but PDL."""
    return {"SIZE": size, "BLOCK": 1024, "num_warps": 4}


def launch(
    table: torch.Tensor, token_ids: torch.Tensor, h: torch.Tensor, partial: torch.Tensor, factor: float | None = None
) -> None:
    """Fill h [M, H] and partial, which are contiguous."""
    if not launches(table):
        return reference(table, token_ids, h, partial, factor)
    num_tokens, size = token_ids.shape[0], table.shape[1]
    meta = config(size)
    if num_tokens:
        grid = (num_tokens, cdiv(size, meta["BLOCK"]))
        embed_kernel[grid](table, token_ids, h, partial, factor, **dependent_launch(table.device), **meta)
    return None
