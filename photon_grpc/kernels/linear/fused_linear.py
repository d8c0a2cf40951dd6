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

import torch

from photon_grpc.kernels.jit import launches
from photon_grpc.kernels.linear.projection import launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.rotary import rotation as rotating
from photon_grpc.kernels.rotary.rotation import Rotation


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
    return launch("add", tile, w, b, a, h, counters, num_rows=h.shape[0])


def swiglu_launch(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, y: torch.Tensor, tile: Tile,
    counters: torch.Tensor,
) -> None:  # fmt: skip
    """Fills y."""
    if not launches(w):
        return swiglu_reference(h, w, b, eps, y, tile, counters)
    return launch("swiglu", tile, w, b, h, y, counters, num_rows=h.shape[0], eps=eps, span=w.shape[0] // 2)


def qkv_launch(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, q: torch.Tensor, cache: torch.Tensor,
    layer: int, rotation: Rotation, tile: Tile, counters: torch.Tensor,
) -> None:  # fmt: skip
    """Fills q, changes cache."""
    if not launches(w):
        return qkv_reference(h, w, b, eps, q, cache, layer, rotation, tile, counters)
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    tensors = {
        "pages": cache[:, layer],
        "cos": rotation.cos,
        "sin": rotation.sin,
        "positions": rotation.positions,
        "slot_mapping": rotation.slot_mapping,
        "block_stride": cache.stride(0),
    }
    heads = {"Q_HEADS": q.shape[1] // head_dim, "KV_HEADS": kv_heads, "BLOCK_SIZE": block_size}
    return launch(
        "rotary", tile, w, b, h, q, counters, num_rows=h.shape[0], eps=eps, span=head_dim // 2, **tensors, **heads
    )
