"""Rotary position embedding of queries and keys, in place.

    (a, b) = (x[i], x[i + D/2]);  x[i] = a·cos - b·sin,  x[i + D/2] = b·cos + a·sin,  cos, sin = table[position, i]

the half-and-half layout of transformers' `rotate_half`. Tables and arithmetic are float32 whatever the dtype of x.

Shapes: q [T, Hq, D], k [T, Hkv, D] (tokens and heads may be strided: both are usually slices of one projection, or the
first numbers of its heads), cos and sin [max_position, D/2] float32, positions [T] int32 or int64. bf16, fp16, fp32.
Bytes moved: 2 · T · (Hq + Hkv) · D · itemsize.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang.formulas import rotated
from photon_grpc.kernels.lang.jit import jit, launches, next_power_of_2, tl


def reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate in torch: overwrites q and k and returns them."""
    return rotate(q, k, *rows(cos, sin, positions))


def rows(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables' rows for `rotate`, the same in every layer: (cos, cos) and (-sin, sin), [T, 1, D] each."""
    cos = cos.index_select(0, positions)[:, None]
    sin = sin.index_select(0, positions)[:, None]
    return torch.cat((cos, cos), dim=2), torch.cat((-sin, sin), dim=2)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate in torch, with the rows of the tables that `rows` returned."""
    for heads in _joined(q, k):
        # (b, a) of every (a, b). Widened by the float32 tables where the heads are narrower, and rounded once.
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        torch.addcmul(heads * cos, swapped, signed_sin, out=heads)
    return q, k


def _joined(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return one view [T, Hq + Hkv, D] if k follows q in memory: half the operations, the cost of small batches."""
    num_tokens, num_heads, size = q.shape
    follows = k.data_ptr() == q.data_ptr() + num_heads * q.stride(1) * q.element_size()
    if not follows or q.stride() != k.stride():
        return q, k
    return (q.as_strided((num_tokens, num_heads + k.shape[1], size), q.stride()),)


class HeadTile(NamedTuple):
    """COUNT neighbouring heads of one token, from head FIRST on, STRIDE apart. The PADs are powers of two.

    HALF is half of what is rotated of a head; where the tile has whole heads, ROTATED is.
    """

    COUNT: int
    COUNT_PAD: int
    HALF: int
    HALF_PAD: int
    FIRST: int
    STRIDE: int
    ROTATED: int = 0


def head_tile(count: int, head_dim: int, first: int = 0, stride: int | None = None) -> HeadTile:
    """Return the tile of `count` heads from `first` on, side by side by default."""
    half = head_dim // 2
    return HeadTile(count, next_power_of_2(count), half, next_power_of_2(half), first, stride or head_dim)


@jit
def rotate_heads(x, cos, sin, HEADS: tl.constexpr):
    """Rotate the heads of one token at x in place; cos and sin are rows [HALF_PAD] in registers."""
    head = tl.arange(0, HEADS.COUNT_PAD)[:, None]
    column = tl.arange(0, HEADS.HALF_PAD)[None, :]
    inside = (head < HEADS.COUNT) & (column < HEADS.HALF)
    first = x + head * HEADS.STRIDE + column
    a = tl.load(first, mask=inside, other=0.0)
    b = tl.load(first + HEADS.HALF, mask=inside, other=0.0)
    rotated_a, rotated_b = rotated(a.to(tl.float32), b.to(tl.float32), cos[None, :], sin[None, :])
    tl.store(first, rotated_a.to(a.dtype), mask=inside)
    tl.store(first + HEADS.HALF, rotated_b.to(b.dtype), mask=inside)


@jit
def rotary_kernel(q, k, cos, sin, positions, q_stride, k_stride, Q: tl.constexpr, KV: tl.constexpr):
    """Rotate one token per program; Q and KV are HeadTiles."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, Q.HALF_PAD)
    at = tl.load(positions + token).to(tl.int64) * Q.HALF + column
    c = tl.load(cos + at, mask=column < Q.HALF, other=0.0)
    s = tl.load(sin + at, mask=column < Q.HALF, other=0.0)
    rotate_heads(q + token * q_stride, c, s, Q)
    rotate_heads(k + token * k_stride, c, s, KV)


@functools.cache
def config(q_heads: int, kv_heads: int, head_dim: int, stride: int | None = None) -> dict[str, Any]:
    """Return the compile-time arguments for one token's heads, `stride` elements apart, `head_dim` by default."""
    heads = head_tile(q_heads, head_dim, stride=stride), head_tile(kv_heads, head_dim, stride=stride)
    return {"Q": heads[0], "KV": heads[1], "num_warps": 4}


def launch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite q [T, Hq, D] and k [T, Hkv, D] (their heads equally far apart) and return them."""
    if not launches(q):
        return reference(q, k, cos, sin, positions)
    num_tokens, q_heads, head_dim = q.shape
    if num_tokens:
        meta = config(q_heads, k.shape[1], head_dim, q.stride(1))
        rotary_kernel[(num_tokens,)](q, k, cos, sin, positions, q.stride(0), k.stride(0), **meta)
    return q, k
