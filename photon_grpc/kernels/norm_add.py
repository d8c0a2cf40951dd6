"""The norm of a product, added to the residual stream: the end of attention and of feed-forward with a norm behind.

    h += round(w · x / sqrt(mean(x²) + eps)),  x = y + b

Arithmetic is float32; where y is the sums of slices of K in float32, they are added in order, and in bf16 rounded once
before all else, as a product in one slice is. The sums of squares of the new h are left for the next norm (squares.py).

Shapes: y [T, H] or [slices, T, H], contiguous, b [H] or None, w [H] of any dtype, h [T, H], partial [T, H / 16]. bf16,
fp16, fp32. Bytes moved: 3 · T · H · itemsize.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.formulas import add_slices, tree_sum
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import jit, launches, next_power_of_2, tl
from photon_grpc.kernels.lang.squares import group_sums


class Norm(NamedTuple):
    """The weight [H] and the eps of a norm."""

    weight: torch.Tensor
    eps: float


def reference(y: torch.Tensor, b: torch.Tensor | None, norm: Norm, h: torch.Tensor, partial: torch.Tensor) -> None:
    """Change h and fill partial in torch."""
    x = y.float() if y.dim() == 2 else functools.reduce(torch.add, y)
    if h.dtype == torch.bfloat16:
        x = x.to(h.dtype).float()
    if b is not None:
        x = x + b.float()
    scale = torch.rsqrt(squares.total_reference(x) / x.shape[1] + norm.eps)[:, None]
    h.add_((x * scale * norm.weight.float()).to(h.dtype))
    partial.copy_(squares.reference(h))


@jit
def norm_add_kernel(
    y, bias, weight, h, partial, slice_stride, eps,
    HIDDEN: tl.constexpr, PAD: tl.constexpr, SLICES: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Change one row of h per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < HIDDEN
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    residual = tl.load(h + row * HIDDEN + column, mask=inside, other=0.0)
    x = add_slices(y + row * HIDDEN + column, slice_stride, inside, SLICES)
    if ROUNDS:
        x = x.to(tl.bfloat16).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(tree_sum(tl.reshape(group_sums(x * x), [1, PAD // 16])), 0)
    normalised = x * tl.rsqrt(total / HIDDEN + eps) * w
    kind: tl.constexpr = h.dtype.element_ty
    added = (residual.to(tl.float32) + normalised.to(kind).to(tl.float32)).to(kind)
    tl.store(h + row * HIDDEN + column, added, mask=inside)
    stored = added.to(tl.float32)
    group = tl.arange(0, PAD // 16)
    tl.store(partial + row * (HIDDEN // 16) + group, group_sums(stored * stored), mask=group < HIDDEN // 16)


@functools.cache
def config(hidden: int, slices: int, *, rounds: bool) -> dict[str, Any]:
    """Return the compile-time arguments for rows of `hidden` columns, all but PDL."""
    pad = squares.GROUP * next_power_of_2(hidden // squares.GROUP)
    warps = max(1, min(8, pad // 512))
    return {"HIDDEN": hidden, "PAD": pad, "SLICES": slices, "ROUNDS": rounds, "num_warps": warps}


def launch(y: torch.Tensor, b: torch.Tensor | None, norm: Norm, h: torch.Tensor, partial: torch.Tensor) -> None:
    """Change h [T, H] and fill partial."""
    if not launches(y):
        return reference(y, b, norm, h, partial)
    sums = y if y.dim() == 3 else y[None]
    constants = config(h.shape[1], sums.shape[0], rounds=h.dtype == torch.bfloat16)
    if h.shape[0]:
        norm_add_kernel[(h.shape[0],)](
            sums, b, norm.weight, h, partial, sums.stride(0), norm.eps, **constants, **dependent_launch(h.device)
        )
    return None
