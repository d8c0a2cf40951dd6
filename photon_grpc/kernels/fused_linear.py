"""The projections of a decode step with what stands before and behind them, for few rows x and a W that memory must stream.

    add_linear:     h += W a
    norm_swiglu:    y = silu(g) · u,  (g, u) = r · W h + b,  r = 1 / sqrt(mean(h²) + eps)
    norm_qkv:       (q, k, v) = r · W h + b;  q and k rotated by their positions;  q is stored, k and v go to their pages

The weight of the norm before a projection is folded into the columns of W: its program reads all of h for the product anyway,
so it sums h² on the way. Sums, norm, rotation and SwiGLU are float32; every result is rounded once.

Shapes: h [M, H] and a [M, K], contiguous and with memory for `tiles.bucket(M)` rows behind their first element (the surplus is read
and does not matter), W [N, K], b [N] or None. W of norm_swiglu is gate above up; W of norm_qkv the heads of q, k and v,
their rotary halves as `rotary.py` has them. cos, sin [max_position, D/2] float32, positions and slot_mapping [M] int64,
cache [num_blocks, layers, 2, Hkv, block_size, D], q [M, Hq · D], y [M, N/2]. `num_tokens` as for `write_kv.py`.
bf16 and fp16.
Bytes moved: N · K · itemsize, all else is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from photon_grpc.kernels.jit import launches
from photon_grpc.kernels.parts.gluon import has_dependent_launch
from photon_grpc.kernels.parts.ring import ring_kernel
from photon_grpc.kernels.parts.tiles import Tile, bucket
from photon_grpc.kernels.parts.wide import wide_kernel


@dataclass(frozen=True, slots=True)
class Rotation:
    """What the tokens of a step need to be rotated and stored; one for all layers.

    cos, sin: float32 [max_position, D/2]. positions, slot_mapping: int64 [M]. num_tokens: [1] or None.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: torch.Tensor | None = None


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
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    heads = _product(h, w, b, eps).view(h.shape[0], -1, head_dim)
    rotated, values = heads[:, :-kv_heads], heads[:, -kv_heads:]
    cos, sin = (table[rotation.positions].unsqueeze(1) for table in (rotation.cos, rotation.sin))
    first, second = rotated.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    q.copy_(rotated[:, :-kv_heads].reshape(q.shape))
    slot = rotation.slot_mapping
    if rotation.num_tokens is not None:
        is_real = torch.arange(slot.shape[0], device=slot.device) < rotation.num_tokens
        slot = torch.where(is_real, slot, slot % block_size)
    stored = torch.stack((rotated[:, -kv_heads:], values), dim=1).to(cache.dtype)
    cache[:, layer][slot // block_size, :, :, slot % block_size] = stored


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
    return _launch("add", tile, w, b, a, h, counters, num_rows=h.shape[0])


def swiglu_launch(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, y: torch.Tensor, tile: Tile,
    counters: torch.Tensor,
) -> None:  # fmt: skip
    """Fills y."""
    if not launches(w):
        return swiglu_reference(h, w, b, eps, y, tile, counters)
    return _launch("swiglu", tile, w, b, h, y, counters, num_rows=h.shape[0], eps=eps, span=w.shape[0] // 2)


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
        "num_tokens": rotation.num_tokens,
        "block_stride": cache.stride(0),
    }
    heads = {"Q_HEADS": q.shape[1] // head_dim, "KV_HEADS": kv_heads, "BLOCK_SIZE": block_size}
    return _launch(
        "rotary", tile, w, b, h, q, counters, num_rows=h.shape[0], eps=eps, span=head_dim // 2, **tensors, **heads
    )


def _launch(
    epilogue: str, tile: Tile, w: torch.Tensor, b: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor,
    counters: torch.Tensor, *, num_rows: int, eps: float | None = None, span: int = 0, **more: Any,
) -> None:  # fmt: skip
    if not num_rows:
        return
    rows = bucket(num_rows)
    n, k = w.shape
    pdl = has_dependent_launch(w.device)
    arguments = dict.fromkeys(("pages", "cos", "sin", "positions", "slot_mapping", "num_tokens", "block_stride"))
    arguments |= dict.fromkeys(("Q_HEADS", "KV_HEADS", "BLOCK_SIZE"), 0) | more
    arguments |= {"w": w, "bias": b, "x": x, "y": y, "num_rows": num_rows, "eps": eps or 0.0}
    constants = {"EPILOGUE": epilogue, "N": n, "K": k, "SPAN": span, "NORM": eps is not None, "PDL": pdl, "BM": rows}
    constants |= {"BN": tile.BN, "BK": tile.BK, "KW": tile.KW, "NS": tile.NS, "num_warps": tile.KW}
    if pdl:
        constants["launch_pdl"] = True
    if tile.kind == "ring":
        ring_kernel[(n // tile.BN,)](**arguments, **constants)
        return
    splits, tiles = tile.SPLITS, n // tile.BN
    share = rows * (tile.BN + 1)
    partial = torch.empty(tiles * splits * share, dtype=torch.float32, device=w.device) if splits > 1 else None
    wide_kernel[(tiles, splits)](
        **arguments, **constants, partial=partial, counters=counters if splits > 1 else None, SPLITS=splits
    )
