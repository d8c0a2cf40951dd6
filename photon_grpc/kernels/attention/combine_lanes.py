"""The fold of the lanes of one (row, key head) that several programs computed, for `gluon_decode.py`."""

from __future__ import annotations

from photon_grpc.kernels.attention.decode_ring import columns_of
from photon_grpc.kernels.attention.lane_sums import fold, fold_weights, num_classes, of_rows
from photon_grpc.kernels.lang.gluon import constexpr_function, gl, gluon_jit

#: Numbers of the lanes' sums that a thread loads before it folds them.
NUMBERS_A_THREAD = 48


@constexpr_function
def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number` (>= 1)."""
    return 1 << (number - 1).bit_length()


@constexpr_function
def lanes_at_once(heads: int, head_dim: int, warps: int) -> int:
    """Return how many lanes are loaded together: of each head a thread has its columns, a total and a high."""
    return power_of_two(max(1, NUMBERS_A_THREAD // (max(1, heads // warps) * (head_dim // 32 + 2)) // 2 + 1))


@constexpr_function
def sums_layout(head_dim: int, warps: int):
    """Return the layout of [heads, D]: the heads over the warps, each thread's columns next to one another."""
    return gl.BlockedLayout([1, head_dim // 32], [1, 32], [warps, 1], [1, 0])


@constexpr_function
def totals_layout(warps: int):
    """Return the layout of [heads, classes]: heads lie where `sums_layout` has them, so no factor moves."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@gluon_jit
def store_lane(
    partials, lane, high, total, acc, head,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Leave high [HEADS], total [HEADS, classes] and acc [D, HEADS] of one lane; `head` is the first of the group.

    partials: sums [lanes, B, Hq, D], highs [lanes, B, Hq], totals [lanes, B, Hq, classes] and counters.
    """
    sums, highs, totals, _ = partials
    D: gl.constexpr = SHAPE.HEAD_DIM
    first = lane.to(gl.int64) * (gl.num_programs(1) * (KV_HEADS * GROUP)) + head
    member = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))[None, :]
    column = gl.arange(0, D, layout=gl.SliceLayout(1, acc.type.layout))[:, None]
    at = sums + first * D + (member * D + columns_of(column, SHAPE, TILE))
    gl.store(at, acc, mask=(member < GROUP) & (column >= 0))
    member = gl.arange(0, high.shape[0], layout=high.type.layout)
    gl.store(highs + first + member, high, mask=member < GROUP)
    member = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, total.type.layout))[:, None]
    number = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))[None, :]
    at = totals + first * total.shape[1] + (member * total.shape[1] + number)
    gl.store(at, total, mask=(member < GROUP) & (number >= 0))


@gluon_jit
def fold_lanes(
    partials, head, num_lanes, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Return total [HEADS, classes] and acc [HEADS, D] of all lanes of a row, folded in their order."""
    sums, highs, totals, _ = partials
    HEADS: gl.constexpr = power_of_two(GROUP)
    AT_ONCE: gl.constexpr = lanes_at_once(HEADS, D, WARPS)
    layout: gl.constexpr = sums_layout(D, WARPS)
    of_classes: gl.constexpr = totals_layout(WARPS)
    heads_a_lane = gl.num_programs(1) * (KV_HEADS * GROUP)
    member = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, of_classes))
    high = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(1, of_classes))
    total = gl.zeros([HEADS, num_classes()], gl.float32, of_classes)
    acc = gl.zeros([HEADS, D], gl.float32, layout)
    for first in range(0, num_lanes, AT_ONCE):
        loaded = ()
        for i in gl.static_range(AT_ONCE):
            lane = first + i
            place = lane.to(gl.int64) * heads_a_lane + head
            there = lane < num_lanes
            loaded = loaded + (load_lane(sums, highs, totals, place, there, member, row, GROUP, D),)
        for i in gl.static_range(AT_ONCE):
            lane_high, lane_total, lane_acc = loaded[i]
            high, kept, own = fold_weights(high, lane_high)
            total = fold(total, lane_total, of_rows(kept, total), of_rows(own, total))
            acc = fold(acc, lane_acc, of_rows(kept, acc), of_rows(own, acc))
    return total, acc


@gluon_jit
def of_pairs(acc):
    """Return the heads [HEADS, 1] and the columns [1, D] of acc [HEADS, D]."""
    layout: gl.constexpr = acc.type.layout
    member = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    return member, gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))[None, :]


@gluon_jit
def load_lane(
    sums, highs, totals, place, there, member, row, GROUP: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Load high [HEADS], total [HEADS, 8] and acc [HEADS, D] past the L1 cache; a missing lane has high -inf.

    Heads that pad the group have high 0.
    """
    layout: gl.constexpr = member.type.layout.parent
    of_classes: gl.constexpr = row.type.layout.parent
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    inside = ((member < GROUP) & there)[:, None] & (column >= 0)
    acc = gl.load(sums + place * D + (member[:, None] * D + column), mask=inside, other=0.0, cache_modifier=".cg")
    number = gl.arange(0, num_classes(), layout=gl.SliceLayout(0, of_classes))[None, :]
    at = totals + place * num_classes() + (row[:, None] * num_classes() + number)
    inside = ((row < GROUP) & there)[:, None] & (number >= 0)
    total = gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    high = gl.load(highs + place + row, mask=(row < GROUP) & there, other=0.0, cache_modifier=".cg")
    return gl.where(there, high, -float("inf")), total, acc
