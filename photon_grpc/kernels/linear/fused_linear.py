"""The projections of a decode step with what stands before and behind them, for few rows x and a W that memory must stream.

    add_linear:     h += W a
    norm_swiglu:    y = silu(g) · u,  (g, u) = r · W h + b,  r = 1 / sqrt(mean(h²) + eps)
    norm_qkv:       (q, k, v) = r · W h + b;  q and k rotated by their positions;  q is stored, k and v go to their pages

The weight of the norm before a projection is folded into the columns of W: its program reads all of h for the product anyway,
so it sums h² on the way. Sums, norm, rotation and SwiGLU are float32; every result is rounded once.

Shapes: h [M, H] and a [M, K], contiguous and with memory for `tiles.bucket(M)` rows behind their first element (the surplus is read
and does not matter), W [N, K], b [N] or None. W of norm_swiglu is gate above up; W of norm_qkv the heads of q, k and v,
their rotary halves as `rotary.py` has them. cos, sin [max_position, D/2] float32, positions and slot_mapping [M] int64,
cache [num_blocks, layers, 2, Hkv, block_size, D], q [M, Hq · D], y [M, N/2]. bf16 and fp16.
Bytes moved: N · K · itemsize, all else is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.gluon import has_dependent_launch
from photon_grpc.kernels.jit import launches
from photon_grpc.kernels.linear import epilogue
from photon_grpc.kernels.linear.gemv import gemv_kernel
from photon_grpc.kernels.linear.tiles import Heads, Problem, Tile, bucket
from photon_grpc.kernels.linear.wgmma import wgmma_kernel
from photon_grpc.kernels.rotary import rotation as rotating
from photon_grpc.kernels.rotary.rotation import Rotation


class Epilogue(NamedTuple):
    """A pair of `epilogue.py`, and the operands of one launch."""

    load: Any
    store: Any
    operands: tuple[Any, ...] | None = None


ADD = Epilogue(epilogue.load_residual, epilogue.add_residual)
SWIGLU = Epilogue(epilogue.load_nothing, epilogue.store_swiglu)


def add_reference(
    h: torch.Tensor, a: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, tile: Tile, counters: torch.Tensor
) -> None:
    """add_linear in torch: changes h."""
    h.copy_(h.float() + _product(a, w, b))


def swiglu_reference(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, y: torch.Tensor, tile: Tile,
    counters: torch.Tensor,
) -> None:  # fmt: skip
    """norm_swiglu in torch: fills y."""
    gate, up = _product(h, w, b, eps).chunk(2, dim=-1)
    y.copy_(torch.nn.functional.silu(gate) * up)


def qkv_reference(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, q: torch.Tensor, cache: torch.Tensor,
    layer: int, rotation: Rotation, tile: Tile, counters: torch.Tensor,
) -> None:  # fmt: skip
    """norm_qkv in torch: fills q, changes cache."""
    product = h.float() @ w.float().T
    rotating.reference(product, h, b, None, eps, q, cache, layer, rotation)


def _product(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float | None = None) -> torch.Tensor:
    x = x.float()
    y = x @ w.float().T
    if eps is not None:
        y *= torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if b is None else y + b.float()


def add_launch(
    h: torch.Tensor, a: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, tile: Tile, counters: torch.Tensor
) -> None:
    """Changes h; `counters` int32 [>= N // tile.BN], zero before and after."""
    if not launches(w):
        return add_reference(h, a, w, b, tile, counters)
    return launch(ADD, tile, w, b, a, h, counters)


def swiglu_launch(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, y: torch.Tensor, tile: Tile,
    counters: torch.Tensor,
) -> None:  # fmt: skip
    """Fills y."""
    if not launches(w):
        return swiglu_reference(h, w, b, eps, y, tile, counters)
    return launch(SWIGLU, tile, w, b, h, y, counters, eps=eps, span=w.shape[0] // 2)


def qkv_launch(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, q: torch.Tensor, cache: torch.Tensor,
    layer: int, rotation: Rotation, tile: Tile, counters: torch.Tensor,
) -> None:  # fmt: skip
    """Fills q, changes cache."""
    if not launches(w):
        return qkv_reference(h, w, b, eps, q, cache, layer, rotation, tile, counters)
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    heads = Heads(q.shape[1] // head_dim, kv_heads, block_size)
    rotary = Epilogue(epilogue.load_angles, epilogue.store_heads, (rotation, cache[:, layer], cache.stride(0)))
    return launch(rotary, tile, w, b, h, q, counters, eps=eps, span=head_dim // 2, heads=heads)


def launch(
    end: Epilogue, tile: Tile, w: torch.Tensor, b: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor,
    counters: torch.Tensor | None = None, *, eps: float | None = None, span: int = 0, guard: bool = False,
    heads: Heads | None = None,
) -> None:  # fmt: skip
    """One of the two kernels; `guard`: x ends behind its rows."""
    num_rows, (n, k) = x.shape[0], w.shape
    rows = bucket(num_rows)
    if not num_rows or rows is None:
        return
    pdl = has_dependent_launch(w.device)
    options = {"num_warps": tile.KW, "launch_pdl": True} if pdl else {"num_warps": tile.KW}
    constants = end.load, end.store, Problem(n, k, rows, span, guard, heads), tile, pdl
    tiles = n // tile.BN
    if tile.kind == "gemv":
        gemv_kernel[(tiles,)](w, b, x, y, num_rows, eps, end.operands, *constants, **options)
        return
    shares = None
    if tile.SPLITS > 1:
        partial = torch.empty(tiles * tile.SPLITS * rows * (tile.BN + 1), dtype=torch.float32, device=w.device)
        shares = partial, counters
    wgmma_kernel[(tiles, tile.SPLITS)](w, b, x, y, num_rows, eps, end.operands, shares, *constants, **options)
