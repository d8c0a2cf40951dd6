"""The projections of a decode step, fused with the operations around them.

They are for few rows x and a W that must be streamed from memory.

    add_linear:     h += W a
    norm_swiglu:    y = silu(g) · u,  (g, u) = r · W h + b,  r = 1 / sqrt(mean(h²) + eps)
    norm_qkv:       (q, k, v) = r · W h + b;  q and k normalised where the family does, and rotated by their positions;
                    k and v go to their pages

The weight of the norm before a projection is folded into the columns of W: its program reads all of h for the product
anyway, so it sums h² on the way. Sums, norm, rotation and SwiGLU are float32; every result is rounded once.

One kernel multiplies, `gemv.py` or `wgmma.py` by the Tile; a Fusion has the operations before and after the product. If
a tile does not divide the heads, or heads are normalised, a second kernel, `rotate_store.py`, is the end of norm_qkv:
tiles that hold a whole head were slower than the two.

Shapes: h [M, H] and a [M, K], contiguous and with memory for `tiles.bucket(M)` rows from their first element on (the
surplus is read and does not matter), W [N, K], b [N] or None. W of norm_swiglu is gate above up; W of norm_qkv the
heads of q, k and v, their rotary halves as `rotary.py` has them. cos, sin [max_position, D/2] float32, positions and
slot_mapping [M] int64, cache [num_blocks, layers, 2, Hkv, block_size, D], q [M, Hq · D], y [M, N/2]. bf16 and fp16.
Bytes moved: N · K · itemsize, all else is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import has_dependent_launch
from photon_grpc.kernels.lang.jit import launches
from photon_grpc.kernels.linear import epilogue
from photon_grpc.kernels.linear.gemv import gemv_kernel
from photon_grpc.kernels.linear.tiles import HeadSplit, Problem, Tile, bucket, holds_heads
from photon_grpc.kernels.linear.wgmma import wgmma_kernel
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput


class Affine(NamedTuple):
    """The map x -> W x + b; W [N, K], b [N] or None."""

    w: torch.Tensor
    b: torch.Tensor | None = None


class Fusion(NamedTuple):
    """Operations joined with a product: a pair of `epilogue.py` with its operands, and the norm before it or None.

    span, heads, guard: as of a Problem.
    """

    load: Any
    store: Any
    operands: tuple[Any, ...] | None = None
    eps: float | None = None
    span: int = 0
    guard: bool = False
    heads: HeadSplit | None = None


ADD = Fusion(epilogue.load_residual, epilogue.add_residual)


def add_reference(h: torch.Tensor, a: torch.Tensor, linear: Affine) -> None:
    """Add in torch: changes h."""
    h.copy_(h.float() + _product(a, linear))


def swiglu_reference(h: torch.Tensor, linear: Affine, eps: float, y: torch.Tensor) -> None:
    """Fill y with norm_swiglu in torch."""
    gate, up = _product(h, linear, eps).chunk(2, dim=-1)
    y.copy_(torch.nn.functional.silu(gate) * up)


def qkv_reference(h: torch.Tensor, linear: Affine, eps: float, out: HeadOutput) -> None:
    """Fill out.q and change out.cache with norm_qkv in torch."""
    rotate_store.reference(h.float() @ linear.w.float().T, h, linear.b, eps, out)


def _product(x: torch.Tensor, linear: Affine, eps: float | None = None) -> torch.Tensor:
    x = x.float()
    y = x @ linear.w.float().T
    if eps is not None:
        y *= torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if linear.b is None else y + linear.b.float()


def add_launch(h: torch.Tensor, a: torch.Tensor, linear: Affine, tile: Tile, counters: torch.Tensor) -> None:
    """Change h; `counters` int32 [>= N // tile.BN] are zero before and after."""
    if not launches(linear.w):
        return add_reference(h, a, linear)
    return launch(ADD, tile, linear, a, h, counters)


def swiglu_launch(
    h: torch.Tensor, linear: Affine, eps: float, y: torch.Tensor, tile: Tile, counters: torch.Tensor
) -> None:
    """Fill y."""
    if not launches(linear.w):
        return swiglu_reference(h, linear, eps, y)
    fusion = Fusion(epilogue.load_nothing, epilogue.store_swiglu, eps=eps, span=linear.w.shape[0] // 2)
    return launch(fusion, tile, linear, h, y, counters)


def qkv_launch(
    h: torch.Tensor, linear: Affine, eps: float, out: HeadOutput, tile: Tile, counters: torch.Tensor
) -> None:
    """Fill out.q and change out.cache."""
    if not launches(linear.w):
        return qkv_reference(h, linear, eps, out)
    q, cache, layer, rotation, norms = out
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    if norms is not None or not holds_heads(tile, head_dim // 2):
        product = torch.empty((h.shape[0], linear.w.shape[0]), dtype=h.dtype, device=h.device)
        launch(Fusion(epilogue.load_nothing, epilogue.store_sums, eps=eps), tile, linear, h, product, counters)
        return rotate_store.launch(product, None, None, eps, out)
    fusion = Fusion(
        epilogue.load_angles,
        epilogue.store_heads,
        (rotation, cache[:, layer], cache.stride(0)),
        eps,
        span=head_dim // 2,
        heads=HeadSplit(q.shape[1] // head_dim, kv_heads, block_size),
    )
    return launch(fusion, tile, linear, h, q, counters)


def launch(
    fusion: Fusion, tile: Tile, linear: Affine, x: torch.Tensor, y: torch.Tensor, counters: torch.Tensor | None = None
) -> None:
    """Fill y from x [M, K] by the tile's kernel; `counters` are needed if K is split over programs."""
    num_rows, (n, k) = x.shape[0], linear.w.shape
    rows = bucket(num_rows)
    if not num_rows or rows is None:
        return
    pdl = has_dependent_launch(x.device)
    options = {"num_warps": tile.KW, "launch_pdl": True} if pdl else {"num_warps": tile.KW}
    tensors = *linear, x, y, num_rows, fusion.eps, fusion.operands
    constants = fusion.load, fusion.store, Problem(n, k, rows, fusion.span, fusion.guard, fusion.heads), tile, pdl
    tiles = n // tile.BN
    if tile.kind == "gemv":
        gemv_kernel[(tiles,)](*tensors, *constants, **options)
        return
    partials = None
    if tile.SPLITS > 1:
        partial = torch.empty(tiles * tile.SPLITS * rows * (tile.BN + 1), dtype=torch.float32, device=x.device)
        partials = partial, counters
    wgmma_kernel[(tiles, tile.SPLITS)](*tensors, partials, *constants, **options)
