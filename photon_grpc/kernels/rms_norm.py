"""RMSNorm, alone and after a residual sum.

    rms_norm:       y = w · round(x / sqrt(mean(x²) + eps))
    add_rms_norm:   h = residual + x;  y = rms_norm(h);  returns (y, h)
    with `once`:    y = round(w · x / sqrt(mean(x²) + eps))

The mean is taken in float32; `round` is the rounding to x's dtype that Llama has before it multiplies by w, and Gemma
and OLMo after it. h is summed in x's dtype, so that all agree with transformers bit for bit wherever float32 sums do.

Shapes: x [T, H] or [T, heads, D] (norm over the last dimension, as for the norm of queries and keys; rows may be
strided, the last dimension is not), residual [T, H], w [H]. bf16, fp16, fp32; w may be float32 beside `once`.
Bytes moved: 2 · T · H · itemsize, and 4 · T · H · itemsize with the residual; w stays in cache.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, *, once: bool = False) -> torch.Tensor:
    """Return rms_norm in torch, a new tensor of x's shape."""
    if x.dtype == torch.float32:
        return _normalised(x, eps).mul_(weight)
    if once:
        return _normalised(x.float(), eps).mul_(weight).to(x.dtype)
    return _normalised(x.float(), eps).to(x.dtype).mul_(weight)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) in float32, in half the operations of torch's own: on few rows of a CPU they are the cost."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


@functools.cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """Return a float32 [1], made once, since making it takes as long as an operation."""
    return torch.tensor([value], device=device)


def add_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, once: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return add_rms_norm in torch: (y, h), both new."""
    total = residual + x
    return reference(total, weight, eps, once=once), total


@jit
def norm_rows(x, weight, eps, SIZE: tl.constexpr, ONCE: tl.constexpr):
    """Return rms_norm in x's dtype for a tile x [rows, SIZE_PAD], zero in columns from SIZE on."""
    x_float = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_float * x_float, axis=1) / SIZE + eps)
    if ONCE:
        return (x_float * scale[:, None] * weight.to(tl.float32)[None, :]).to(x.dtype)
    else:
        return (x_float * scale[:, None]).to(x.dtype) * weight[None, :]


@jit
def rms_norm_kernel(
    x, weight, y, num_rows, x_stride_token, x_stride_head, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROWS: tl.constexpr, ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write y [num_rows, SIZE] from rows (token, head) of x; ROWS rows per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE_PAD)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    source = (row // HEADS).to(tl.int64) * x_stride_token + (row % HEADS) * x_stride_head
    tile = tl.load(x + source[:, None] + column[None, :], mask=inside, other=0.0)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0)
    tl.store(y + row.to(tl.int64)[:, None] * SIZE + column[None, :], norm_rows(tile, w, eps, SIZE, ONCE), mask=inside)


@jit
def add_rms_norm_kernel(
    x, residual, weight, y, total, num_rows, x_stride, residual_stride, eps,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROWS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Write y and total, both [num_rows, SIZE]; ROWS rows per program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, SIZE_PAD)
    inside = (row < num_rows) & (column < SIZE)[None, :]
    added = tl.load(x + row * x_stride + column[None, :], mask=inside, other=0.0)
    tile = tl.load(residual + row * residual_stride + column[None, :], mask=inside, other=0.0) + added
    w = tl.load(weight + column, mask=column < SIZE, other=0.0)
    tl.store(total + row * SIZE + column[None, :], tile, mask=inside)
    tl.store(y + row * SIZE + column[None, :], norm_rows(tile, w, eps, SIZE, ONCE), mask=inside)


def config(size: int, *, once: bool = False) -> dict[str, Any]:
    """Return the compile-time arguments for rows of `size`: about 1,024 elements a program, or one long row."""
    size_pad = next_power_of_2(size)
    return {
        "SIZE": size,
        "SIZE_PAD": size_pad,
        "ROWS": max(1, 1024 // size_pad),
        "ONCE": once,
        "num_warps": min(8, max(2, size_pad // 512)),
    }


def launch(x: torch.Tensor, weight: torch.Tensor, eps: float, *, once: bool = False) -> torch.Tensor:
    """Return rms_norm of x [T, H] or [T, heads, D], a new, contiguous tensor of x's shape."""
    if not launches(x):
        return reference(x, weight, eps, once=once)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    stride_head = x.stride(1) if x.dim() == 3 else 0
    num_rows = x.shape[0] * heads
    meta = config(x.shape[-1], once=once)
    if num_rows:
        grid = (cdiv(num_rows, meta["ROWS"]),)
        numbers = num_rows, x.stride(0), stride_head, eps
        rms_norm_kernel[grid](x, weight, y, *numbers, HEADS=heads, **meta, **dependent_launch(x.device))
    return y


def add_launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, once: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return add_rms_norm of x and residual [T, H]: (y, h), both new and contiguous."""
    if not launches(x):
        return add_reference(x, residual, weight, eps, once=once)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y)
    meta = config(x.shape[1], once=once)
    if x.shape[0]:
        grid = (cdiv(x.shape[0], meta["ROWS"]),)
        strides = x.stride(0), residual.stride(0)
        add_rms_norm_kernel[grid](x, residual, weight, y, total, x.shape[0], *strides, eps, **meta)
    return y, total
