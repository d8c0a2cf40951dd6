"""A copy of the residual stream, kept for what reads it behind the step, which does not hold up the layers.

    place = x (+ residual, rounded once)

A kernel between two layers that is launched as they are, by programmatic dependent launch: the product behind it begins
to read its weights while the one before it ends.

Shapes: x, residual, place [T, H], rows of any stride, columns contiguous. bf16, fp16, fp32. Bytes moved: 2 or 3 · T · H
· itemsize.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl

#: Columns of a program.
SPAN = 1024


@jit
def keep_rows_kernel(tensors, strides, HIDDEN: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    """Copy SPAN columns of a row per program; tensors: x, residual or None, place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = column < HIDDEN
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kept = tl.load(tensors[0] + row * strides[0] + column, mask=inside, other=0.0)
    if tensors[1] is not None:
        other = tl.load(tensors[1] + row * strides[1] + column, mask=inside, other=0.0)
        kept = (kept.to(tl.float32) + other.to(tl.float32)).to(tensors[0].dtype.element_ty)
    tl.store(tensors[2] + row * strides[2] + column, kept, mask=inside)


def launch(x: torch.Tensor, residual: torch.Tensor | None, place: torch.Tensor) -> None:
    """Write x [T, H], plus residual if that is given, to place [T, H]."""
    if not launches(x):
        place.copy_(x) if residual is None else torch.add(x, residual, out=place)
        return
    num_rows, hidden = x.shape
    strides = x.stride(0), 0 if residual is None else residual.stride(0), place.stride(0)
    if num_rows:
        meta = {"HIDDEN": hidden, "SPAN": SPAN, "num_warps": 4, **dependent_launch(x.device)}
        keep_rows_kernel[num_rows, cdiv(hidden, SPAN)]((x, residual, place), strides, **meta)
