"""y = x Wᵀ with W stored in 8 bits and x quantized on the way: the same bits at any number of rows.

    y = round((Σ q_x · q_w) · s_w · s_x)                      a scale of each row of x and of each row of W
    y = round(Σ_c (Σ q_x · q_w over 128 columns) · (s_x[c] · s_w[c]))      of 128 columns of x, of 128 x 128 of W

How x becomes q_x and s_x: `quantize.py`. int8 sums are exact; e4m3 sums are those of 128 columns, added forwards in
float32. Up to 128 rows `wgmma8.py` multiplies, or the library where the model of cost finds it cheaper; above them, and
from 65 rows on by a large W, `wide8.py`, or the library where `wide8.py` does not divide W. Without matrix units of 8
bits (on a CPU) it is the reference in torch.

Shapes: x [T, K], values int8 or e4m3 [N, K], scales float32 [1, N] or [K / 128, N / 128] -> y [T, N].
Bytes moved: N · K, all else is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import has_dependent_launch, has_wgmma
from photon_grpc.kernels.lang.jit import counters_of
from photon_grpc.kernels.linear import epilogue, library8, quantize, tiles8, wide8
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.fused_linear import Fusion
from photon_grpc.kernels.linear.quantize import QuantizedRows
from photon_grpc.kernels.linear.tiles import Problem, Tile
from photon_grpc.kernels.linear.tiles8 import Way, Weights
from photon_grpc.kernels.linear.wgmma8 import Eight, wgmma8_kernel


class Weight8(NamedTuple):
    """A weight in 8 bits: values int8 or e4m3 [N, K], scales float32 [1, N] or [K / 128, N / 128].

    norm: the weight [K] of the norm before the product, which multiplies x; None: it is in W, or there is none.
    """

    values: torch.Tensor
    scales: torch.Tensor
    norm: torch.Tensor | None = None


#: How a part of x is multiplied where there are more rows than buckets; the second if 128 does not divide W.
PARTS = Way(Tile("wgmma", 128, 128, 8, 5), 128), Way(Tile("wgmma", 64, 128, 4, 5), 128)
PLAIN = Fusion(epilogue.load_nothing, epilogue.store_sums)


def kind_of(weight: Weight8) -> Weights:
    return Weights(weight.values.dtype == torch.int8, library8.has_blocks(*_tensors(weight)))


def quantized(x: torch.Tensor, weight: Weight8, eps: float | None = None) -> QuantizedRows:
    """Return x in the 8 bits of the weight, with eps also the factors of its norm."""
    return quantize.launch(x, weight.values.dtype, grouped=kind_of(weight).has_blocks, weight=weight.norm, eps=eps)


def way_of(weight: Weight8, num_rows: int, end: str = "add", span: int = 0) -> Way | None:
    """Return how a product of so many rows is multiplied with its epilogue; None: by the library, or not at once."""
    rows = tiles8.bucket(num_rows)
    if not num_rows or rows is None or not has_wgmma(weight.values.device):
        return None
    n, k = weight.values.shape
    may_decline = library8.takes(*_tensors(weight))
    return tiles8.choose(Product(n, k, rows, span, end), kind_of(weight), may_decline=may_decline)


def product(x: torch.Tensor, weight: Weight8, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return x Wᵀ [T, N], in x's dtype if no other is given."""
    return multiply(quantized(x, weight), weight, dtype or x.dtype)


def multiply(rows: QuantizedRows, weight: Weight8, dtype: torch.dtype) -> torch.Tensor:
    """Return the product of rows that are quantized."""
    tokens, device = rows.values.shape[0], rows.values.device
    tensors, way, wide = _tensors(weight), way_of(weight, tokens), is_wide(weight, tokens, dtype)
    if not wide and way is None and tokens and library8.takes(*tensors):
        return library8.scaled(rows, *tensors, dtype)
    y = torch.empty((tokens, weight.values.shape[0]), dtype=dtype, device=device)
    if wide:
        wide8.launch(PLAIN, tensors, rows, y)
    elif way is not None:
        counters = counters_of(weight.values, y.shape[1] // way.tile.BN) if way.slices > 1 else None
        launch(PLAIN, way, weight, rows, y, counters=counters)
    elif tokens and (parts := _parts(weight)) is not None:
        launch(PLAIN, parts, weight, rows, y, in_parts=True)
    else:
        y.copy_(library8.reference(rows, *tensors))
    return y


def is_wide(weight: Weight8, num_rows: int, dtype: torch.dtype) -> bool:
    """Return whether `wide8.py` multiplies so many rows, with a result of this dtype."""
    return wide8.takes(weight.values, num_rows, dtype)


def reference(x: torch.Tensor, weight: Weight8, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return x Wᵀ in torch, on any device."""
    values, scales = _tensors(weight)
    rows = quantize.reference(x, values.dtype, grouped=kind_of(weight).has_blocks, weight=weight.norm)
    return library8.reference(rows, values, scales).to(dtype or x.dtype)


def _tensors(weight: Weight8) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.values, weight.scales


def _parts(weight: Weight8) -> Way | None:
    """Return how rows are multiplied in parts; None if no tile divides the weight, or the device has no wgmma."""
    if not has_wgmma(weight.values.device):
        return None
    n, k = weight.values.shape
    return next((way for way in PARTS if tiles8.fits(way, Problem(n, k, way.rows), kind_of(weight))), None)


def launch(
    fusion: Fusion, way: Way, weight: Weight8, rows: QuantizedRows, y: torch.Tensor,
    partial: torch.Tensor | None = None, bias: torch.Tensor | None = None, counters: torch.Tensor | None = None,
    *, in_parts: bool = False,
) -> None:  # fmt: skip
    """Fill y from quantized rows, which have memory for whole tiles.

    `partial` is needed with a norm, `bias` is that behind it; `counters` are needed if slices of K are shared out.
    """
    tile, bucket, slices = way
    (n, k), num_rows, device = weight.values.shape, rows.values.shape[0], y.device
    pdl, has_blocks = has_dependent_launch(device), kind_of(weight).has_blocks
    partials = None
    if slices > 1:
        sums = torch.empty(n * slices * bucket, dtype=torch.int32, device=device)
        partials = sums, counters
    options: dict[str, Any] = {"num_warps": tile.KW, "launch_pdl": True} if pdl else {"num_warps": tile.KW}
    grid = n // tile.BN, slices, -(-num_rows // bucket) if in_parts else 1
    wgmma8_kernel[grid](
        weight.values, weight.scales, bias, rows.values, rows.scales, rows.scales.stride(-1) if has_blocks else None,
        y, num_rows, fusion.eps, partial, fusion.operands, partials,
        fusion.load, fusion.store, Problem(n, k, bucket, fusion.span, HEADS=fusion.heads, SLICES=slices), tile,
        Eight(has_blocks, in_parts), pdl, **options,
    )  # fmt: skip
