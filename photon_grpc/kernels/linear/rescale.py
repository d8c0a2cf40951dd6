"""From the sums of a product of 8-bit numbers to the product itself.

    y = round(p),  p = (float32(sums) · s_w) · s_x          rounded at each product, then to y's dtype

Shapes: sums int32 or float32 [T, N] contiguous, s_x float32 [T], s_w float32 [N] -> y [T, N]. bf16, fp16, fp32.
Bytes moved: T · N · (4 + itemsize).
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl


def reference(sums: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, y: torch.Tensor) -> None:
    """Fill y in torch."""
    y.copy_(sums.float() * s_w * s_x[:, None])


@jit
def rescale_kernel(sums, s_x, s_w, y, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write BLOCK columns of one row of y per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    of_w = tl.load(s_w + column, mask=inside, other=0.0)
    scaled = tl.load(sums + row * SIZE + column, mask=inside, other=0).to(tl.float32) * of_w * tl.load(s_x + row)
    tl.store(y + row * SIZE + column, scaled.to(y.dtype.element_ty), mask=inside)


def config(size: int) -> dict[str, Any]:
    """Return the compile-time arguments for rows of `size` columns, all but PDL."""
    return {"SIZE": size, "BLOCK": 2048, "num_warps": 8}


def launch(sums: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, y: torch.Tensor) -> None:
    """Fill y."""
    if not launches(sums):
        return reference(sums, s_x, s_w, y)
    rows, size = sums.shape
    meta = config(size)
    if rows:
        rescale_kernel[(rows, cdiv(size, meta["BLOCK"]))](sums, s_x, s_w, y, **meta, **dependent_launch(sums.device))
    return None
