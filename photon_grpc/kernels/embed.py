"""Rows of an embedding table, as the first kernel of a chain: h[t] = table[token_ids[t]].

Shapes: table [V, H], token_ids [M] int32 or int64, below V -> h [M, H]. bf16, fp16, fp32.
Bytes moved: 2 · M · H · itemsize.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl


def reference(table: torch.Tensor, token_ids: torch.Tensor, h: torch.Tensor) -> None:
    """Fill h in torch."""
    h.copy_(table[token_ids])


@jit
def embed_kernel(table, token_ids, h, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy BLOCK columns of one row per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    source = tl.load(token_ids + row).to(tl.int64) * SIZE + column
    tl.store(h + row * SIZE + column, tl.load(table + source, mask=inside), mask=inside)


def config(size: int) -> dict[str, Any]:
    """Return the compile-time arguments for rows of `size` columns, all but PDL."""
    return {"SIZE": size, "BLOCK": 1024, "num_warps": 4}


def launch(table: torch.Tensor, token_ids: torch.Tensor, h: torch.Tensor) -> None:
    """Fill h [M, H], which is contiguous."""
    if not launches(table):
        return reference(table, token_ids, h)
    num_tokens, size = token_ids.shape[0], table.shape[1]
    meta = config(size)
    if num_tokens:
        grid = (num_tokens, cdiv(size, meta["BLOCK"]))
        embed_kernel[grid](table, token_ids, h, **dependent_launch(table.device), **meta)
    return None
