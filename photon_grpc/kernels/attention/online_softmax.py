"""Attention of a tile of queries to a tile of keys in pages, with the running maximum and sum of an online softmax."""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.key_order import plain_order
from photon_grpc.kernels.lang.jit import jit, next_power_of_2, tl


@jit
def key_offsets(
    table, start, stop, block_stride, SHAPE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the element offsets int64 [BLOCK_N] of keys start … start + BLOCK_N - 1 of a row.

    `start` is a multiple of BLOCK_N.

    One look-up where a tile lies in one page, one for each key where it spans several. Keys from `stop` on point into
    block 0 or past the valid part of their page and must be masked.
    """
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    key = start + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        page = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    else:
        page = tl.load(table + key // BLOCK_SIZE, mask=key < stop, other=0).to(tl.int64)
    return page * block_stride + (key % BLOCK_SIZE) * SHAPE.HEAD_DIM


@jit
def attend(
    q, keys, values, offsets, in_context, visible, high, total, acc, scale, SHAPE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Attend to BLOCK_N keys; q [M, HEAD_PAD], in_context [BLOCK_N], visible broadcasts to [M, BLOCK_N].

    Keys and values have q's type, or 8 bits, which are exact in it.

    Without MASKED every query sees every key of the tile, and the masks are not read. `scale`, above 0, includes
    log2(e). Returns the new (high [M], total [M], acc [M, HEAD_PAD]): running maximum in units of log2, sum, unscaled
    output.
    """
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    HEAD_PAD: tl.constexpr = SHAPE.HEAD_PAD
    column = tl.arange(0, HEAD_PAD)
    k = load_rows(keys + offsets[:, None] + column[None, :], in_context, column, HEAD_DIM, HEAD_PAD, MASKED)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=SHAPE.PRECISION)
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_high = tl.maximum(high, tl.max(scores, axis=1) * scale)
    base = new_high
    if MASKED:
        # A row that has seen no key yet has no maximum to subtract: -inf - -inf would be NaN.
        base = tl.where(new_high == -float("inf"), 0.0, new_high)
    p = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    shrink = tl.exp2(high - base)
    v = load_rows(values + offsets[:, None] + column[None, :], in_context, column, HEAD_DIM, HEAD_PAD, MASKED)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=SHAPE.PRECISION)
    return new_high, tl.fma(total, shrink, tl.sum(p, axis=1)), acc


@jit
def empty_lane(BLOCK_M: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return high [M], total [M] and acc [M, HEAD_PAD] before the first key."""
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    return high, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)


@jit
def fold(high, total, acc, lane_high, lane_total, lane_acc):
    """Return the sums (high [M], total [M], acc [M, HEAD_PAD]) of the lanes so far and of one more."""
    top = tl.maximum(high, lane_high)
    base = tl.where(top == -float("inf"), 0.0, top)
    ours, theirs = tl.exp2(high - base), tl.exp2(lane_high - base)
    acc = tl.fma(acc, ours[:, None], lane_acc * theirs[:, None])
    return top, tl.fma(total, ours, lane_total * theirs), acc


@jit
def scale_of(scales, scale, plane, kv_head, SHAPE: tl.constexpr):
    """Return `scale` times that of the key head's keys (plane 0) or values (1), where pages have scales."""
    if scales is not None:
        scale = scale * tl.load(scales.scales + plane * SHAPE.KV_HEADS + kv_head)
    return scale


@jit
def load_rows(at, in_context, column, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, MASKED: tl.constexpr):
    """Load a tile [BLOCK_N, HEAD_PAD] of keys or values, zero outside of the context and of the head."""
    inside = (column < HEAD_DIM)[None, :]
    if MASKED:
        tile = tl.load(at, mask=in_context[:, None] & inside, other=0.0)
    elif HEAD_PAD != HEAD_DIM:
        tile = tl.load(at, mask=inside, other=0.0)
    else:
        tile = tl.load(at)
    return tile


class HeadShape(NamedTuple):
    """Constants of a layer that a kernel is compiled for: GROUP query heads for each of KV_HEADS key heads.

    WINDOW is the number of tokens that a query looks back; 0 is all of them.
    """

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    HEAD_PAD: int
    BLOCK_SIZE: int
    WINDOW: int
    #: Precision of matrix products.
    PRECISION: str
    #: Keys of a softmax update, and of a lane: see `key_order.py`.
    UPDATE: int
    LANE: int


def shape(q_heads: int, pages: torch.Tensor, window: int, dtype: torch.dtype) -> HeadShape:
    """Return the constants of `q_heads` query heads of this dtype over these pages."""
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    # float32 means float32: the tensor cores' tf32 would lose half of the digits.
    precision = "ieee" if dtype == torch.float32 else "tf32"
    padded = next_power_of_2(head_dim)
    order = plain_order(padded, dtype.itemsize)
    return HeadShape(kv_heads, q_heads // kv_heads, head_dim, padded, block_size, window, precision, *order)
