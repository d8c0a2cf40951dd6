"""The steps of one group of warps of `hopper_varlen.py`: tile by tile the scores, the softmax and the weighted sum."""

from __future__ import annotations

from photon_grpc.kernels.attention.lane_sums import class_sums, fold, fold_weights, num_classes, of_rows, update
from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    gl,
    gluon_jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon_jit
def soften(scores, high, total, scale, key, position, WINDOW: gl.constexpr, MASKED: gl.constexpr):
    """Return `update` of a tile of scores, with MASKED for the keys that each query sees from its position."""
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = gl.where(visible, scores, -float("inf"))
    return update(scores, high, total, scale, MASKED)


@constexpr_function
def num_parts(head_dim: int) -> int:
    """Return the parts in which a query's sums are folded: registers have room for 128 columns beside all of them."""
    return max(1, head_dim // 128)


@gluon_jit
def parts_of(acc):
    """Return acc [64, D] in `num_parts` parts, a tuple."""
    if num_parts(acc.shape[1]) == 1:
        return (acc,)
    else:
        return gl.split(gl.permute(gl.reshape(acc, [acc.shape[0], 2, acc.shape[1] // 2]), [0, 2, 1]))


@gluon_jit
def fold_sums(kept, acc, kept_factor, lane_factor):
    """Add the sums of a lane, acc [64, D], to those of the lanes before it in shared memory, a tuple of parts."""
    parts = parts_of(acc)
    for i in gl.static_range(num_parts(acc.shape[1])):
        part = parts[i]
        before = kept[i].load(part.type.layout)
        kept[i].store(fold(before, part, of_rows(kept_factor, part), of_rows(lane_factor, part)))


@gluon_jit
def begin_lane(high, total, kept_high, kept_total):
    """Fold high and total of the lane before. Return those of an empty lane, those folded, and the factors of sums."""
    kept_high, kept_factor, lane_factor = fold_weights(kept_high, high)
    kept_total = fold(kept_total, total, of_rows(kept_factor, total), of_rows(lane_factor, total))
    high = gl.full(high.shape, -float("inf"), gl.float32, high.type.layout)
    total = gl.full(total.shape, 0.0, gl.float32, total.type.layout)
    return high, total, kept_high, kept_total, kept_factor, lane_factor


@gluon_jit
def step(
    q, ring, kept, state, zero, j, begin, scale, number, position,
    WINDOW: gl.constexpr, LANE_STEPS: gl.constexpr, NS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute scores, softmax and weighted sum of tile j in turn; other groups fill the gaps of the tensor cores."""
    ks, vs, k_ready, v_ready, k_free, v_free = ring
    acc, high, total, kept_high, kept_total = state
    stage, turn = (j - begin) % NS, (j - begin) // NS & 1
    if (j % LANE_STEPS == 0) & (j > begin):
        high, total, kept_high, kept_total, kept_factor, lane_factor = begin_lane(high, total, kept_high, kept_total)
        fold_sums(kept, acc, kept_factor, lane_factor)
        acc = gl.full(acc.shape, 0.0, gl.float32, acc.type.layout)
    mbarrier.wait(k_ready.index(stage), turn)
    scores = warpgroup_mma(q, ks.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(stage), count=1)
    key = j * ks.shape[1] + number
    weights, shrink, high, total = soften(scores, high, total, scale, key, position, WINDOW, MASKED)
    acc = acc * of_rows(shrink, acc)
    weights = gl.convert_layout(weights.to(vs.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    mbarrier.wait(v_ready.index(stage), turn)
    acc = warpgroup_mma(weights, vs.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(stage), count=1)
    return acc, high, total, kept_high, kept_total


@gluon_jit
def ahead_step(
    q, ring, kept, state, weights, zero, j, begin, scale, number, position,
    WINDOW: gl.constexpr, LANE_STEPS: gl.constexpr, NS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute scores and softmax of tile j and, beside the softmax, the weighted sum of tile j - 1."""
    ks, vs, k_ready, v_ready, k_free, v_free = ring
    acc, high, total, kept_high, kept_total = state
    turn = j - begin
    stage, older = turn % NS, (turn - 1) % NS
    kept_factor = high
    lane_factor = high
    if j % LANE_STEPS == 0:
        high, total, kept_high, kept_total, kept_factor, lane_factor = begin_lane(high, total, kept_high, kept_total)
    mbarrier.wait(k_ready.index(stage), turn // NS & 1)
    scores = warpgroup_mma(q, ks.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(older), (turn - 1) // NS & 1)
    acc = warpgroup_mma(weights, vs.index(older), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(stage), count=1)
    key = j * ks.shape[1] + number
    new_weights, shrink, high, total = soften(scores, high, total, scale, key, position, WINDOW, MASKED)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(older), count=1)
    if j % LANE_STEPS == 0:
        fold_sums(kept, acc, kept_factor, lane_factor)
        acc = gl.full(acc.shape, 0.0, gl.float32, acc.type.layout)
    else:
        acc = acc * of_rows(shrink, acc)
    weights = gl.convert_layout(new_weights.to(vs.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    return acc, high, total, kept_high, kept_total, weights


@gluon_jit
def attend_all(
    q, ring, kept, scale, position, tiles, WINDOW: gl.constexpr, TILE: gl.constexpr,
    out_mma: gl.constexpr, score_mma: gl.constexpr,
):  # fmt: skip
    """Return acc [64, D], total [64, 8] of one group's last lane, and the factors of the lanes in `kept` and of it.

    tiles: the first one, those from which and up to which none needs a mask, and the one after the last.
    """
    ks, vs, k_ready, v_ready, k_free, _ = ring
    begin, clear, full, steps = tiles
    BN: gl.constexpr = TILE.BN
    NS: gl.constexpr = TILE.NS
    LANE_STEPS: gl.constexpr = TILE.LANE // BN
    PAIRS: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    number = gl.arange(0, BN, layout=gl.SliceLayout(0, score_mma))
    zero = gl.zeros([PAIRS, BN], gl.float32, score_mma)
    high = gl.full([PAIRS], -float("inf"), gl.float32, gl.SliceLayout(1, score_mma))
    classes = class_sums(zero)
    total = gl.full([PAIRS, num_classes()], 0.0, gl.float32, classes.type.layout)
    acc = gl.zeros([PAIRS, D], gl.float32, out_mma)
    kept_high, kept_total = high, total
    nothing = parts_of(acc)
    for i in gl.static_range(num_parts(D)):
        kept[i].store(nothing[i])
    if TILE.AHEAD:
        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma(q, ks.index(0).permute([1, 0]), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(0), count=1)
        first, _, high, total = soften(scores, high, total, scale, begin * BN + number, position, WINDOW, True)
        weights = gl.convert_layout(first.to(vs.dtype), gl.DotOperandLayout(0, out_mma, 2))
        if WINDOW:
            for j in range(begin + 1, clear):
                acc, high, total, kept_high, kept_total, weights = ahead_step(
                    q, ring, kept, (acc, high, total, kept_high, kept_total), weights, zero, j, begin, scale, number,
                    position, WINDOW, LANE_STEPS, NS, True,
                )  # fmt: skip
        for j in range(gl.maximum(clear, begin + 1) if WINDOW else 1, full):
            acc, high, total, kept_high, kept_total, weights = ahead_step(
                q, ring, kept, (acc, high, total, kept_high, kept_total), weights, zero, j, begin, scale, number,
                position, WINDOW, LANE_STEPS, NS, False,
            )  # fmt: skip
        for j in range(gl.maximum(full, begin + 1), steps):
            acc, high, total, kept_high, kept_total, weights = ahead_step(
                q, ring, kept, (acc, high, total, kept_high, kept_total), weights, zero, j, begin, scale, number,
                position, WINDOW, LANE_STEPS, NS, True,
            )  # fmt: skip
        last = steps - 1 - begin
        mbarrier.wait(v_ready.index(last % NS), last // NS & 1)
        acc = warpgroup_mma(weights, vs.index(last % NS), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    else:
        if WINDOW:
            for j in range(begin, clear):
                acc, high, total, kept_high, kept_total = step(
                    q, ring, kept, (acc, high, total, kept_high, kept_total), zero, j, begin, scale, number, position,
                    WINDOW, LANE_STEPS, NS, True,
                )  # fmt: skip
        for j in range(clear, full):
            acc, high, total, kept_high, kept_total = step(
                q, ring, kept, (acc, high, total, kept_high, kept_total), zero, j, begin, scale, number, position,
                WINDOW, LANE_STEPS, NS, False,
            )  # fmt: skip
        for j in range(full, steps):
            acc, high, total, kept_high, kept_total = step(
                q, ring, kept, (acc, high, total, kept_high, kept_total), zero, j, begin, scale, number, position,
                WINDOW, LANE_STEPS, NS, True,
            )  # fmt: skip
    _, _, _, total, kept_factor, lane_factor = begin_lane(high, total, kept_high, kept_total)
    return acc, total, kept_factor, lane_factor
