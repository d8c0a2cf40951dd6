"""Rows of an embedding table, as the first kernel of a chain: h[t] = factor · table[token_ids[t]], and their squares.

The sums of squares are those of the rounded rows. A table of 8 bits with a scale a row has the numbers of `weight.py`.

Shapes: table [V, H], token_ids [M] int32 or int64, below V -> h [M, H], partial [M, H / 16] (squares.py). bf16, fp16,
fp32.
Bytes moved: M · H · (itemsize of the table + itemsize).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.lang.squares import group_sums
from photon_grpc.kernels.linear.weight import QuantizedWeight, dequantize

Table = torch.Tensor | QuantizedWeight


def rows(table: Table, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of the ids, [M, H]."""
    if not isinstance(table, QuantizedWeight):
        return F.embedding(token_ids, table)
    ids = token_ids.long()
    return dequantize(table.part(ids), table.scales.dtype)


def reference(
    table: Table, token_ids: torch.Tensor, h: torch.Tensor, partial: torch.Tensor, factor: float | None = None
) -> None:
    """Fill h and partial in torch."""
    found = rows(table, token_ids)
    h.copy_(found if factor is None else found * factor)
    partial.copy_(squares.reference(h))


@jit
def embed_kernel(
    table, scales, token_ids, h, partial, factor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_ARRANGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK columns of one row per program. scales: of a table of 8 bits; IS_ARRANGED: by `decode.arrange`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    token = tl.load(token_ids + row).to(tl.int64)
    # Of 16 columns, which is 8h + 2t + i.
    within = column % 16
    place = column - within + within % 8 // 2 * 4 + within % 2 * 2 + within // 8 if IS_ARRANGED else column
    found = tl.load(table + token * SIZE + place, mask=inside, other=0)
    if scales is not None:
        q = found ^ -128 if IS_ARRANGED else found
        scale = tl.load(scales + token)
        found = (q.to(tl.float32) * scale.to(tl.float32)).to(scale.dtype)
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
    table: Table, token_ids: torch.Tensor, h: torch.Tensor, partial: torch.Tensor, factor: float | None = None
) -> None:
    """Fill h [M, H] and partial, which are contiguous."""
    if not launches(h):
        return reference(table, token_ids, h, partial, factor)
    num_tokens, size = token_ids.shape[0], table.shape[1]
    meta = config(size)
    if num_tokens:
        grid = (num_tokens, cdiv(size, meta["BLOCK"]))
        values, scales, is_arranged = table, None, False
        if isinstance(table, QuantizedWeight):
            values, scales, is_arranged = table.values, table.scales, table.is_arranged
        meta |= {"IS_ARRANGED": is_arranged} | dependent_launch(h.device)
        embed_kernel[grid](values, scales, token_ids, h, partial, factor, **meta)
    return None
