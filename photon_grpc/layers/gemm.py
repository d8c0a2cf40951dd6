"""Products with a W that is stored unchanged, each with its epilogue: the operations fused before and after it.

    rotary:  q, pages <- rotated (r · W h + b)        r = 1 / sqrt(mean(h²) + eps), the norm of the residual stream
    swiglu:  y <- silu(g) · u,  (g, u) = r · W h + b
    add:     h <- W x + (h + b)
    logits:  W x in float32
    sample:  an id from the logits

`tiled_…` is a kernel of ours that does all of it. `library_…` is the matrix library, which reads the residual stream
before its norm and adds to it, followed by a kernel that applies the norm. Both give the same bits: K is cut as the
weight's format says, sums are rounded in the same places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.nn import functional as F

from photon_grpc.kernels import swiglu
from photon_grpc.kernels.linear import head, slices, tiles
from photon_grpc.kernels.linear.fused_linear import Affine, ResidualStream, add_launch, qkv_launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Norms
from photon_grpc.kernels.sampling.sample import SamplingMetadata
from photon_grpc.layers.workspace import Workspace

#: A product with its epilogue; its arguments are those of the functions below, after `end`.
Gemm = Callable[..., Any]


class Operands(Protocol):
    """Weight [out_features, in_features] and bias [out_features] of a product, and the slices of its sum: a Linear."""

    weight: Any
    bias: torch.Tensor | None
    num_slices: int


def affine(linear: Operands) -> Affine:
    return Affine(linear.weight, linear.bias, linear.num_slices)


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """The operations that a product is fused with.

    span: distance of the rows of W that belong together: half a head for "rotary", gate to up for "swiglu".
    eps: that of the norm before "rotary" and "swiglu", whose weight is folded into W.
    norms: weights [D] of the norms of query and of key heads, with the same eps; None: there are none.
    """

    epilogue: Literal["rotary", "add", "swiglu", "logits", "sample"]
    span: int = 0
    eps: float = 0.0
    norms: Norms | None = None


def bucket(num_rows: int) -> int:
    """Return the smallest of tiles.BUCKETS that holds num_rows; 0 above them all, and for no rows."""
    return (tiles.bucket(num_rows) or 0) if num_rows else 0


def tiled_rotary(linear: Operands, tile: Tile, end: Epilogue, work: Workspace, pages: torch.Tensor, layer: int) -> None:
    """Fill work.q, and `layer` of pages [num_blocks, layers, 2, Hkv, block_size, D]."""
    out = HeadOutput(work.q, pages, layer, work.rotation, end.norms)
    qkv_launch(work.stream(), affine(linear), end.eps, out, tile, work.counters)


def library_rotary(linear: Operands, end: Epilogue, work: Workspace, pages: torch.Tensor, layer: int) -> None:
    """Fill work.q and the pages as `tiled_rotary` does."""
    out = HeadOutput(work.q, pages, layer, work.rotation, end.norms)
    rotate_store.launch(_product(work.h, linear), work.h, linear.bias, end.eps, out)


def tiled_swiglu(linear: Operands, tile: Tile, end: Epilogue, work: Workspace) -> None:
    """Fill work.y."""
    swiglu_launch(work.stream(), affine(linear), end.eps, work.y, tile, work.counters)


def library_swiglu(linear: Operands, end: Epilogue, work: Workspace) -> None:
    """Fill work.y as `tiled_swiglu` does."""
    swiglu.norm_launch(_summed(work.h, linear), work.h, linear.bias, end.eps, work.y)


def tiled_add(linear: Operands, tile: Tile, end: Epilogue, work: Workspace, x: torch.Tensor) -> None:
    """Change work.h."""
    add_launch(ResidualStream(work.h, work.written()), x, affine(linear), tile, work.counters)


def library_add(linear: Operands, end: Epilogue, work: Workspace, x: torch.Tensor) -> None:
    """Change work.h as `tiled_add` does."""
    work.outdated()
    if linear.num_slices > 1:
        return slices.add_launch(work.h, slices.products(x, linear.weight, linear.num_slices), linear.bias)
    if linear.bias is not None:
        work.h.add_(linear.bias)
    work.h.addmm_(x, linear.weight.t())
    return None


def _product(x: torch.Tensor, linear: Operands) -> torch.Tensor:
    """Return x Wᵀ [T, N] in x's dtype, or the float32 sums [slices, T, N] of several slices."""
    if linear.num_slices > 1:
        return slices.products(x, linear.weight, linear.num_slices)
    return x @ linear.weight.t()


def _summed(x: torch.Tensor, linear: Operands) -> torch.Tensor:
    """Return x Wᵀ [T, N], rounded to x's dtype."""
    product = _product(x, linear)
    return product if product.dim() == 2 else functools.reduce(torch.add, product).to(x.dtype)


def tiled_logits(linear: Operands, tile: Tile, end: Epilogue, x: torch.Tensor) -> torch.Tensor:
    """Return logits: [R, hidden_size] -> float32 [R, vocab_size]."""
    return head.logits_launch(x, affine(linear), tile)


def library_logits(linear: Operands, end: Epilogue, x: torch.Tensor) -> torch.Tensor:
    """Return logits as `tiled_logits` does."""
    if linear.num_slices > 1:
        return functools.reduce(torch.add, slices.products(x, linear.weight, linear.num_slices))
    if x.is_cuda and x.dtype != torch.float32:
        # The sums are float32 in the multiplier: they are not rounded on the way out.
        return torch.mm(x, linear.weight.t(), out_dtype=torch.float32)
    return F.linear(x, linear.weight).float()


def tiled_sample(
    linear: Operands, tile: Tile, end: Epilogue, x: torch.Tensor, metadata: SamplingMetadata
) -> torch.Tensor:
    """Return an id for each row of x, int64 [R], as `kernels/sampling/sample.py` does; logits are never written."""
    return head.sample_launch(x, affine(linear), metadata, tile)


TILED: dict[str, Gemm] = {
    "rotary": tiled_rotary,
    "add": tiled_add,
    "swiglu": tiled_swiglu,
    "logits": tiled_logits,
    "sample": tiled_sample,
}
LIBRARY: dict[str, Gemm] = {
    "rotary": library_rotary,
    "add": library_add,
    "swiglu": library_swiglu,
    "logits": library_logits,
}
