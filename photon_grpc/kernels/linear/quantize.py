"""Rows of activations in 8 bits, with a scale of each row, or of each 128 columns of a row.

    a = max |x|,  s = max(a / L, 2^-40),  q = round(x / s)          L = 127 for int8, 448 for e4m3

x is taken as it is, in 16 or 32 bits. Both divisions are those of float32, correctly rounded; `round` is to the nearest
even integer, or to the nearest e4m3, ties to even. A maximum is the same in any order, so q and s do not depend on how
a row is shared by threads, nor on the rows beside it. A row with inf or NaN has that scale, and its product is NaN.

Before a product that follows an RMSNorm, x is the residual stream h: the norm's weight is in W, and its factor r > 0 is
one number for the row. Quantizing h gives the q that quantizing r · h would give, but for roundings of r · h; so r
multiplies the finished product, as in the 16-bit kernels. Everywhere, in this order:

    round to 16 bits: h → q, s → sums of q · W → float32 → · s_w → · s → round to 16 bits → · r → + b → end

Shapes: x [T, K] contiguous -> values [T, K] with memory for `padded_rows(T)` rows, scales float32 [T], or [T, K / 128]
with the rows of a column side by side. bf16, fp16, fp32. Bytes moved: T · K · (itemsize + 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.formulas import quotient, tree_sum
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.lang.squares import group_sums

#: Columns that share a scale where rows have more than one.
GROUP = 128
#: The least scale: rows of zeros are divided by it.
TINY = 2.0**-40
#: The type of the numbers -> the largest of them.
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: Buckets of rows that one program along x multiplies; above them x is padded to a multiple of the last.
ROWS = (8, 16, 32, 64, 128)
#: Of so many rows a program quantizes as many as have so many numbers: smaller programs begin more slowly than memory
#: delivers what they read.
MANY_ROWS, MANY_NUMBERS = 1024, 2048


class QuantizedRows(NamedTuple):
    """Quantized rows: values int8 or e4m3 [T, K], scales float32 [T] or [T, K / 128].

    norms: r = 1 / sqrt(mean(x²) + eps) of each row before it was quantized, float32 [T], if asked for.
    """

    values: torch.Tensor
    scales: torch.Tensor
    norms: torch.Tensor | None = None

    @property
    def stride(self) -> int:
        """The elements from one group's scales to the next's; 0 where rows have one scale."""
        return self.scales.stride(1) if self.scales.dim() == 2 else 0


def padded_rows(num_rows: int) -> int:
    """Return the rows that buffers have memory for: the smallest bucket, or a multiple of the largest."""
    return next((size for size in ROWS if size >= num_rows), cdiv(num_rows, ROWS[-1]) * ROWS[-1])


def reference(
    x: torch.Tensor, kind: torch.dtype, *, grouped: bool = False,
    weight: torch.Tensor | None = None, eps: float | None = None,
) -> QuantizedRows:  # fmt: skip
    """Return what `launch` does in torch."""
    size = x.shape[1]
    norms = None if eps is None else torch.rsqrt(squares.total_reference(x) / size + eps)
    tile = (x if weight is None else x * weight).float()
    if grouped:
        tile = F.pad(tile, (0, -size % GROUP)).unflatten(1, (-1, GROUP))
    scale = (tile.abs().amax(-1, keepdim=True) / LIMITS[kind]).clamp_min(TINY)
    scaled = tile / scale
    scaled = scaled.where(scaled == scaled, 0.0)
    if kind == torch.int8:
        values = scaled.round().to(kind)
    else:
        values = scaled.clamp(-LIMITS[kind], LIMITS[kind]).to(kind)
    return QuantizedRows((values.flatten(1) if grouped else values)[:, :size].contiguous(), scale.squeeze(-1), norms)


@jit
def scales_of(tile, LIMIT: tl.constexpr):
    """Return the scales [R] of rows of a tile [R, N] in float32."""
    # As integers, inf and NaN are above all other absolute values, and none is lost.
    largest = tl.max(tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, LIMIT)
    return tl.where(scale < 2.0**-40, 2.0**-40, scale)


@jit
def quantized(tile, scale, KIND: tl.constexpr):
    """Return a tile [R, N] in float32 divided by the scales of its rows, in 8 bits."""
    # Numbers over inf are zeros with their signs, as those over zero with an inverse of zero are here.
    divisor = tl.where(scale < float("inf"), scale, 0.0)[:, None]
    scaled = quotient(tile, divisor, tl.div_rn(1.0, scale)[:, None])
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if KIND.is_int():
        # Adding 1.5 · 2^23 rounds a small float32 to an integer, ties to even, and leaves it in the last bits.
        return (scaled + 12582912.0).to(tl.int32, bitcast=True).to(KIND)
    else:
        return scaled.to(KIND)


@jit
def quantize_rows_kernel(
    x, weight, values, scales, scale_stride, norms, eps,
    num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantize GROUPS groups of WIDTH columns of ROWS rows per program; groups' scales are `scale_stride` apart.

    Rows are multiplied by `weight` first, if there is one. With `norms` a program has one whole row. num_rows: None
    if programs have one.
    """
    if PDL:
        # The next kernel may take its weights while this one waits.
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0).to(tl.int64) * ROWS
    number = tl.arange(0, ROWS * GROUPS)
    row, group = number // GROUPS, tl.program_id(1) * GROUPS + number % GROUPS
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at, inside, has_scale = row[:, None] * SIZE + column, column < SIZE, group * WIDTH < SIZE
    if num_rows is not None:
        is_row = first + row < num_rows
        inside, has_scale = inside & is_row[:, None], has_scale & is_row
    tile = tl.load(x + first * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if norms is not None:
        sums = group_sums(tl.reshape(tile * tile, [GROUPS * WIDTH]))
        total = tl.sum(tree_sum(tl.reshape(sums, [1, sums.shape[0]])), 0)
        tl.store(norms + first, tl.rsqrt(total / SIZE + eps))
    if weight is not None:
        tile = tile * tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
        tile = tile.to(x.dtype.element_ty).to(tl.float32)
    scale = scales_of(tile, LIMIT)
    tl.store(values + first * SIZE + at, quantized(tile, scale, values.dtype.element_ty), mask=inside)
    tl.store(scales + first + row + group * scale_stride, scale, mask=has_scale)


def config(
    size: int, kind: torch.dtype, *, grouped: bool, whole: bool = False, is_many: bool = False
) -> dict[str, Any]:
    """Return the compile-time arguments for rows of `size` columns, all but PDL.

    whole: a program has one whole row; else of many rows it may have several.
    """
    width = GROUP if grouped else next_power_of_2(size)
    groups = next_power_of_2(cdiv(size, GROUP)) if grouped else 1
    groups = groups if whole else min(16, groups)
    rows = max(1, MANY_NUMBERS // (groups * width)) if is_many and not whole else 1
    shape = {"SIZE": size, "ROWS": rows, "GROUPS": groups, "WIDTH": width, "LIMIT": LIMITS[kind]}
    return shape | {"num_warps": max(1, min(16, rows * groups * width // 512))}


def launch(
    x: torch.Tensor, kind: torch.dtype, *, grouped: bool = False,
    weight: torch.Tensor | None = None, eps: float | None = None,
) -> QuantizedRows:  # fmt: skip
    """Return the rows of x, or of x · weight, quantized; with eps also their norms.

    Values and scales have memory for `padded_rows` rows.
    """
    if not launches(x):
        return reference(x, kind, grouped=grouped, weight=weight, eps=eps)
    tokens, size = x.shape
    rows = memory_for(x, kind, grouped=grouped)
    norms = None if eps is None else torch.empty(tokens, dtype=torch.float32, device=x.device)
    meta = config(size, kind, grouped=grouped, whole=eps is not None, is_many=tokens >= MANY_ROWS)
    if tokens:
        grid = cdiv(tokens, meta["ROWS"]), cdiv(cdiv(size, GROUP) if grouped else 1, meta["GROUPS"])
        counted = tokens if meta["ROWS"] > 1 else None
        tensors = x, weight, rows.values, rows.scales, rows.stride, norms, eps, counted
        quantize_rows_kernel[grid](*tensors, **meta, **dependent_launch(x.device))
    return rows._replace(norms=norms)


def memory_for(x: torch.Tensor, kind: torch.dtype, *, grouped: bool = False) -> QuantizedRows:
    """Return rows for those of x, not filled, with memory for `padded_rows` rows behind them."""
    tokens, size = x.shape
    padded, groups = padded_rows(tokens), cdiv(size, GROUP) if grouped else 1
    values = torch.empty((padded, size), dtype=kind, device=x.device)
    scales = torch.empty((groups, padded), dtype=torch.float32, device=x.device)
    return QuantizedRows(values[:tokens], scales[:, :tokens].t() if grouped else scales[0, :tokens])
