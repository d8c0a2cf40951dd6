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
from photon_grpc.kernels.linear import epilogue, wide8
from photon_grpc.kernels.linear.fused_linear import Fusion, Gate, ResidualStream, gated_fusion, heads_fusion
from photon_grpc.kernels.linear.products8 import (
    PLAIN,
    Weight8,
    is_wide,
    launch,
    product,
    quantized,
)
from photon_grpc.kernels.linear.tiles import holds_heads
from photon_grpc.kernels.linear.tiles8 import Way
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from photon_grpc.kernels.swiglu import Activation


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
    weight = linear.weight
    if is_wide(weight, h.shape[0], h.dtype):
        fusion = Fusion(epilogue.load_residual, epilogue.add_residual, (linear.b, None))
        return wide8.launch(fusion, (weight.values, weight.scales), quantized(a, weight), h)
    if linear.b is not None:
        h.add_(linear.b)
    h.add_(product(a, weight, h.dtype))
    return None


def swiglu_launch(
    stream: ResidualStream, linear: Linear8, gate: Gate, y: torch.Tensor, way: Way, counters: torch.Tensor
) -> None:
    """Fill y with norm_swiglu."""
    fusion = gated_fusion(gate, linear.weight.values.shape[0] // 2)
    rows = quantized(stream.h, linear.weight)
    launch(fusion, way, linear.weight, rows, y, stream.partial, linear.b, counters)


def swiglu_apart(
    h: torch.Tensor, linear: Linear8, eps: float, y: torch.Tensor, activation: Activation = "silu"
) -> None:
    """Fill y as `swiglu_launch` does."""
    weight = linear.weight
    span = weight.values.shape[0] // 2
    if is_wide(weight, h.shape[0], h.dtype) and wide8.holds_pairs(span):
        fusion = gated_fusion(Gate(eps, activation), span)
        return wide8.launch(fusion, (weight.values, weight.scales), quantized(h, weight, eps), y, linear.b)
    return swiglu.norm_launch(product(h, weight, sums_dtype(h.dtype)), h, linear.b, eps, y, activation)


def qkv_launch(
    stream: ResidualStream, linear: Linear8, eps: float, out: HeadOutput, way: Way, counters: torch.Tensor
) -> None:
    """Fill out.q and change out.cache with norm_qkv."""
    h, weight = stream.h, linear.weight
    rows = quantized(h, weight)
    if out.is_behind or not holds_heads(way.tile, out.cache.shape[-1] // 2):
        qkv = torch.empty((h.shape[0], weight.values.shape[0]), dtype=sums_dtype(h.dtype), device=h.device)
        launch(PLAIN, way, weight, rows, qkv, counters=counters)
        return rotate_store.launch(qkv, h, linear.b, eps, out, stream.partial)
    return launch(heads_fusion(out, eps), way, weight, rows, out.q, stream.partial, linear.b, counters)


def sums_launch(x: torch.Tensor, linear: Linear8, way: Way, counters: torch.Tensor) -> torch.Tensor:
    """Return W x of x [M, K], a new tensor [M, N]: rounded in bf16, else in float32."""
    weight = linear.weight
    y = torch.empty((x.shape[0], weight.values.shape[0]), dtype=sums_dtype(x.dtype), device=x.device)
    launch(PLAIN, way, weight, quantized(x, weight), y, counters=counters)
    return y


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what a product is rounded to before its norm."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def qkv_apart(h: torch.Tensor, linear: Linear8, eps: float, out: HeadOutput) -> None:
    """Fill out.q and change out.cache as `qkv_launch` does."""
    weight = linear.weight
    can_fuse = not out.is_behind and wide8.holds_pairs(out.cache.shape[-1] // 2)
    if can_fuse and is_wide(weight, h.shape[0], h.dtype):
        tensors = weight.values, weight.scales
        return wide8.launch(heads_fusion(out, eps), tensors, quantized(h, weight, eps), out.q, linear.b)
    return rotate_store.launch(product(h, weight, sums_dtype(h.dtype)), h, linear.b, eps, out)
