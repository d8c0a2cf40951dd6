"""The projections of a step with W and its input in 8 bits, fused with the operations around them.

The formulas are those of `fused_linear.py` with the product of `products8.py` in place of W h and W a, rounded in the
same places; the residual stream stays in 16 bits:

    h = round(round(W a) + round(h + b));   y = end(r · round(W h) + b)

`..._launch`: one kernel after the one that quantizes, its tile and slices by `tiles8.choose`. `..._apart`: the product
alone, at any number of rows, and a second kernel; in torch where kernels do not run. Both have the same bits.

Shapes: as of `fused_linear.py`; W as of `products8.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels import swiglu
from photon_grpc.kernels.linear import epilogue, rescale
from photon_grpc.kernels.linear.fused_linear import Fusion, ResidualStream, heads_fusion
from photon_grpc.kernels.linear.products8 import PLAIN, Weight8, by_library, launch, library_sums, product, quantized
from photon_grpc.kernels.linear.rescale import sums_dtype
from photon_grpc.kernels.linear.tiles import holds_heads
from photon_grpc.kernels.linear.tiles8 import Way
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput


class Linear8(NamedTuple):
    """The map x -> W x + b; b [N] in 16 bits or None."""

    weight: Weight8
    b: torch.Tensor | None = None


def add_launch(stream: ResidualStream, a: torch.Tensor, linear: Linear8, way: Way, counters: torch.Tensor) -> None:
    """Change the stream, h += W a + b; `counters` int32 [>= N // BN] are zero before and after."""
    fusion = Fusion(epilogue.load_residual, epilogue.add_residual, (linear.b, stream.partial))
    rows = quantized(a, linear.weight)
    launch(fusion, way, linear.weight, rows, stream.h, counters=counters)


def add_apart(h: torch.Tensor, a: torch.Tensor, linear: Linear8) -> None:
    """Change h as `add_launch` does."""
    if by_library(linear.weight, h.shape[0]):
        for where, (sums, scales) in library_sums(quantized(a, linear.weight), linear.weight):
            rescale.add_launch(sums, scales, linear.weight.scales[0], linear.b, h[where])
        return
    if linear.b is not None:
        h.add_(linear.b)
    h.add_(product(a, linear.weight, h.dtype))


def swiglu_launch(
    stream: ResidualStream, linear: Linear8, eps: float, y: torch.Tensor, way: Way, counters: torch.Tensor
) -> None:
    """Fill y with norm_swiglu."""
    span = linear.weight.values.shape[0] // 2
    fusion = Fusion(epilogue.load_nothing, epilogue.store_swiglu, eps=eps, span=span)
    rows = quantized(stream.h, linear.weight)
    launch(fusion, way, linear.weight, rows, y, stream.partial, linear.b, counters)


def swiglu_apart(h: torch.Tensor, linear: Linear8, eps: float, y: torch.Tensor) -> None:
    """Fill y as `swiglu_launch` does."""
    weight = linear.weight
    if by_library(weight, h.shape[0]):
        for where, (sums, scales) in library_sums(quantized(h, weight), weight):
            rescale.swiglu_launch(sums, scales, weight.scales[0], linear.b, h[where], eps, y[where])
        return
    swiglu.norm_launch(product(h, weight, sums_dtype(h.dtype)), h, linear.b, eps, y)


def qkv_launch(
    stream: ResidualStream, linear: Linear8, eps: float, out: HeadOutput, way: Way, counters: torch.Tensor
) -> None:
    """Fill out.q and change out.cache with norm_qkv."""
    h, weight = stream.h, linear.weight
    rows = quantized(h, weight)
    if out.norms is not None or not rotates(way, out.cache.shape[-1] // 2):
        qkv = torch.empty((h.shape[0], weight.values.shape[0]), dtype=sums_dtype(h.dtype), device=h.device)
        launch(PLAIN, way, weight, rows, qkv, counters=counters)
        return rotate_store.launch(qkv, h, linear.b, eps, out, stream.partial)
    return launch(heads_fusion(out, eps), way, weight, rows, out.q, stream.partial, linear.b, counters)


def rotates(way: Way, span: int) -> bool:
    """Return whether the product's own kernel rotates heads; angles of more rows do not fit into its registers."""
    return way.rows <= 128 and holds_heads(way.tile, span)


def qkv_apart(h: torch.Tensor, linear: Linear8, eps: float, out: HeadOutput) -> None:
    """Fill out.q and change out.cache as `qkv_launch` does."""
    rotate_store.launch(product(h, linear.weight, sums_dtype(h.dtype)), h, linear.b, eps, out)
