"""From the sums of a product of 8-bit numbers to the product itself, alone and with the end of a projection.

    rescale:  y = round(p),  p = (float32(sums) · s_x) · s_w          rounded at each product, then to y's dtype
    add:      h = round(round(p) + round(h + b))
    swiglu:   y = silu(g) · u,  (g, u) = r · round(p) + b             as norm_swiglu of `swiglu.py`

In swiglu p is rounded to bf16 where y is bf16, and not at all otherwise: float16 ends at 65,504.

Shapes: sums int32 or float32 [T, N] contiguous, s_x float32 [T], s_w float32 [N], h [T, H], b [N] or None -> y [T, N],
h [T, N] or y [T, N / 2]. bf16, fp16, fp32. Bytes moved: T · N · (4 + itemsize).
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels import swiglu
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.lang.squares import levels, row_scale
from photon_grpc.kernels.swiglu import store_product


def reference(sums: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, y: torch.Tensor) -> None:
    """Fill y in torch."""
    y.copy_(sums.float() * s_x[:, None] * s_w)


def add_reference(
    sums: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor
) -> None:
    """Change h in torch."""
    y = torch.empty_like(h)
    reference(sums, s_x, s_w, y)
    if b is not None:
        h.add_(b)
    h.add_(y)


def swiglu_reference(
    sums: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, b: torch.Tensor | None,
    h: torch.Tensor, eps: float, y: torch.Tensor,
) -> None:  # fmt: skip
    """Fill y with swiglu in torch."""
    product = torch.empty(sums.shape, dtype=sums_dtype(h.dtype), device=h.device)
    reference(sums, s_x, s_w, product)
    swiglu.norm_reference(product, h, b, eps, y)


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what a product is rounded to before its norm."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@jit
def rescaled(sums, s_x, s_w, column, inside):
    """Load these columns of a row of sums, multiplied by their scales, in float32."""
    of_w = tl.load(s_w + column, mask=inside, other=0.0)
    return tl.load(sums + column, mask=inside, other=0).to(tl.float32) * s_x * of_w


@jit
def rescale_kernel(sums, s_x, s_w, y, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write BLOCK columns of one row of y per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = rescaled(sums + row * SIZE, tl.load(s_x + row), s_w, column, column < SIZE)
    tl.store(y + row * SIZE + column, scaled.to(y.dtype.element_ty), mask=column < SIZE)


@jit
def rescale_add_kernel(sums, s_x, s_w, bias, h, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Change BLOCK columns of one row of h per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    scaled = rescaled(sums + row * SIZE, tl.load(s_x + row), s_w, column, inside)
    residual = tl.load(h + row * SIZE + column, mask=inside, other=0.0)
    if bias is not None:
        added = residual.to(tl.float32) + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        residual = added.to(residual.dtype)
    total = scaled.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(h + row * SIZE + column, total.to(residual.dtype), mask=inside)


@jit
def rescale_swiglu_kernel(
    sums, s_x, s_w, bias, h, y, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HIDDEN: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one row of y [T, SIZE] per program, BLOCK columns at a time."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    scale = row_scale(row, h, None, eps, HIDDEN, LEVELS)
    of_x = tl.load(s_x + row)
    for begin in range(0, SIZE, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < SIZE
        gate = rescaled(sums + row * (2 * SIZE), of_x, s_w, column, inside)
        up = rescaled(sums + row * (2 * SIZE) + SIZE, of_x, s_w + SIZE, column, inside)
        if y.dtype.element_ty == tl.bfloat16:
            gate, up = gate.to(tl.bfloat16), up.to(tl.bfloat16)
        store_product((gate, up), bias, y + row * SIZE, column, scale, SIZE)


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


def add_launch(
    sums: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor
) -> None:
    """Change h."""
    if not launches(sums):
        return add_reference(sums, s_x, s_w, b, h)
    rows, size = sums.shape
    meta = config(size)
    if rows:
        rescale_add_kernel[(rows, cdiv(size, meta["BLOCK"]))](
            sums, s_x, s_w, b, h, **meta, **dependent_launch(h.device)
        )
    return None


def swiglu_config(size: int, hidden: int) -> dict[str, Any]:
    """Return the compile-time arguments of `swiglu`, all but PDL."""
    return {"SIZE": size, "BLOCK": 2048, "HIDDEN": hidden, "LEVELS": levels(hidden), "num_warps": 8}


def swiglu_launch(
    sums: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, b: torch.Tensor | None,
    h: torch.Tensor, eps: float, y: torch.Tensor,
) -> None:  # fmt: skip
    """Fill y [T, N / 2] from h [T, H] and the sums of its product."""
    if not launches(sums):
        return swiglu_reference(sums, s_x, s_w, b, h, eps, y)
    rows, size = y.shape
    if rows:
        meta = swiglu_config(size, h.shape[1])
        rescale_swiglu_kernel[(rows,)](sums, s_x, s_w, b, h, y, eps, **meta, **dependent_launch(h.device))
    return None
