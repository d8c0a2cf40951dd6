"""Joins the partial results that the programs of one (row, key head) have left, each of a share of its keys; for
`gluon_decode.py`."""

from __future__ import annotations

from photon_grpc.kernels.gluon import gl, gluon_jit


@gluon_jit
def join_shares(
    partial, partial_weight, place, num_shares, column, is_head,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(acc [D, HEADS], total [HEADS]) over the shares' results in the order of their numbers."""
    high = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(0, layout))
    acc = gl.zeros([HEAD_DIM, HEADS], gl.float32, layout)
    for share in range(0, num_shares, 2):
        # Two at a time: their loads are under way together.
        weight, part = load_share(partial, partial_weight, place, share, num_shares, column, is_head, HEAD_DIM)
        weight_2, part_2 = load_share(partial, partial_weight, place, share + 1, num_shares, column, is_head, HEAD_DIM)
        high, total, acc = fold(high, total, acc, weight, part)
        high, total, acc = fold(high, total, acc, weight_2, part_2)
    return acc, total


@gluon_jit
def load_share(partial, partial_weight, place, share, num_shares, column, is_head, HEAD_DIM: gl.constexpr):
    """(weight [HEADS], result [D, HEADS]) of one share, past the first-level cache; of no weight where there is
    none."""
    there = is_head & (share < num_shares)
    weight = gl.load(partial_weight + place + share, mask=there, other=0.0, cache_modifier=".cg")
    at = partial + (place + share)[None, :] * HEAD_DIM + column[:, None]
    part = gl.load(at, mask=there[None, :], other=0.0, cache_modifier=".cg")
    return gl.where(share < num_shares, weight, -float("inf")), part


@gluon_jit
def fold(high, total, acc, weight, part):
    """The running result with one more share's in it."""
    top = gl.maximum(high, weight)
    shrink, factor = gl.exp2(high - top), gl.exp2(weight - top)
    return top, total * shrink + factor, acc * shrink[None, :] + part * factor[None, :]
