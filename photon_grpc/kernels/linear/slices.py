"""Products of the matrix library with K in slices, and the addition of their sums.

    sums[s] = x[:, slice s] W[:, slice s]ᵀ                  float32 [S, T, N]
    add:  h = round(round(sums[0] + … + sums[S - 1]) + round(h + b)),  slices added in order

The library must not split K itself (`runner/library.py`).

Shapes: x [T, K], W [N, K], h [T, N] contiguous, b [N] or None. bf16, fp16, fp32.
Bytes moved by the addition: (4 · S + 2 · itemsize) · T · N.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.formulas import add_slices
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.linear.cut import slice_columns


def products(x: torch.Tensor, w: torch.Tensor, slices: int) -> torch.Tensor:
    """Return the sums of the slices: float32 [slices, T, N]."""
    (rows, k), n = x.shape, w.shape[0]
    columns = slice_columns(k, slices)
    if not x.is_cuda or x.dtype == torch.float32:
        parts = zip(x.float().split(columns, 1), w.float().split(columns, 1), strict=True)
        return torch.stack([part @ weight.t() for part, weight in parts])
    if slices * columns == k:
        # Batches of one product fill the device better than one product after the other.
        of_x = x.view(rows, slices, columns).transpose(0, 1)
        return torch.bmm(of_x, w.view(n, slices, columns).permute(1, 2, 0), out_dtype=torch.float32)
    sums = torch.empty((slices, rows, n), dtype=torch.float32, device=x.device)
    for part, weight, out in zip(x.split(columns, 1), w.split(columns, 1), sums, strict=True):
        torch.mm(part, weight.t(), out_dtype=torch.float32, out=out)
    return sums


def add_reference(h: torch.Tensor, sums: torch.Tensor, b: torch.Tensor | None) -> None:
    """Add in torch: changes h."""
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    if b is not None:
        h.add_(b)
    h.add_(total.to(h.dtype))


@jit
def add_slices_kernel(
    h, sums, bias, stride, SIZE: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Change BLOCK columns of one row of h per program; `stride` is that of a slice."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    residual = tl.load(h + row * SIZE + column, mask=inside, other=0.0)
    if bias is not None:
        added = residual.to(tl.float32) + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        residual = added.to(residual.dtype)
    total = add_slices(sums + row * SIZE + column, stride, inside, SLICES)
    total = total.to(residual.dtype).to(tl.float32)
    tl.store(h + row * SIZE + column, (total + residual.to(tl.float32)).to(residual.dtype), mask=inside)


def config(size: int, slices: int) -> dict[str, Any]:
    """Return the compile-time arguments for rows of `size` columns, all but PDL."""
    return {"SIZE": size, "SLICES": slices, "BLOCK": 1024, "num_warps": 4}


def add_launch(h: torch.Tensor, sums: torch.Tensor, b: torch.Tensor | None) -> None:
    """Change h."""
    if not launches(h):
        return add_reference(h, sums, b)
    rows, size = h.shape
    meta = config(size, sums.shape[0])
    if rows:
        grid = rows, cdiv(size, meta["BLOCK"])
        add_slices_kernel[grid](h, sums, b, sums.stride(0), **meta, **dependent_launch(h.device))
    return None
