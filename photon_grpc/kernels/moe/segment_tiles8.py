"""The tiles of `segments8.py`: which a program takes, how they are fetched and multiplied, and how they end."""

from __future__ import annotations

from typing import NamedTuple

from photon_grpc.kernels.lang.formulas import silu_product
from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    gl,
    gluon_jit,
    mbarrier,
    tma,
)
from photon_grpc.kernels.linear.wide8_sums import float_sums, integer_sums, sums_layout


class SegmentProblem8(NamedTuple):
    """W [E, N, K]; SPAN: from a row of gate to that of up, 0: there is none."""

    N: int
    K: int
    SPAN: int


class SegmentTile8(NamedTuple):
    """Constants that the kernel is compiled for, named as those of `wide8.WideTile8` where they are the same.

    HALVES of 64 rows of W of a tile, NS steps of STEP columns in flight, TURN steps of e4m3 that overlap. GROUP: of
    warps. PARTS of 128 pairs. BLOCKS: blocks have no scales.
    """

    HALVES: int
    NS: int
    TURN: int
    GROUP: int = 0
    PARTS: int = 1
    BLOCKS: bool = False
    STEP: int = 128


@constexpr_function
def of_second_group(tile: SegmentTile8) -> SegmentTile8:
    """Return the constants of the second group of warps."""
    return tile._replace(GROUP=1)


@constexpr_function
def columns_of(span: int, halves: int) -> int:
    """Return the columns of results of a tile."""
    return 32 * halves if span else 64 * halves


@constexpr_function
def tiles_across(n: int, span: int, halves: int) -> int:
    """Return the tiles of an entry of the work list."""
    return -(-(span or n) // columns_of(span, halves))


@gluon_jit
def tile_of(work, number, tiles, P: gl.constexpr, W: gl.constexpr):
    """Return a tile: its expert, first column of results, first row of x, and where its pairs begin and end.

    One from `tiles` on has no pairs.
    """
    ACROSS: gl.constexpr = tiles_across(P.N, P.SPAN, W.HALVES)
    COLUMNS: gl.constexpr = columns_of(P.SPAN, W.HALVES)
    entry, there = number // ACROSS, number < tiles
    expert = gl.load(work.expert + entry, mask=there, other=0)
    row = gl.load(work.row + entry, mask=there, other=0)
    first = gl.load(work.first + entry, mask=there, other=0)
    return expert, number % ACROSS * COLUMNS, row, first, gl.load(work.count + entry, mask=there, other=0)


@gluon_jit
def each_tile(ring, work, operands, BODY: gl.constexpr, P: gl.constexpr, W: gl.constexpr):
    """Take the tiles of this program in turn: the program of a group of four warps, or of the fetching one.

    BODY takes the ring, a tile, the number of its first step, `operands`, P and W, and returns the number of the step
    behind its last.
    """
    number = 0
    tiles = gl.load(work.size) * tiles_across(P.N, P.SPAN, W.HALVES)
    found = tile_of(work, gl.program_id(0), tiles, P, W)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        this = found
        # The next one is known when this one ends.
        found = tile_of(work, tile + gl.num_programs(0), tiles, P, W)
        number = BODY(ring, this, number, operands, P, W)


@gluon_jit
def fetch(ring, found, number, operands, P: gl.constexpr, W: gl.constexpr):
    """Fetch the steps of a tile into the ring; return the number of the step after it."""
    ws, xs, ready, free = ring
    x, w = operands
    expert, column, row, begin, count = found
    NS: gl.constexpr = W.NS
    HALF: gl.constexpr = 32 * W.HALVES
    SECOND: gl.constexpr = P.SPAN if P.SPAN > 0 else HALF
    OF_W: gl.constexpr = 2 * HALF * 128
    is_full = count - begin > 64
    of_w = expert * P.N + column
    for step in range((P.K + W.STEP - 1) // W.STEP):
        stage = number % NS
        mbarrier.wait(free.index(stage), (number // NS + 1) & 1)
        at = ready.index(stage)
        mbarrier.expect(at, 128 * 128 + OF_W, pred=is_full)
        mbarrier.expect(at, 64 * 128 + OF_W, pred=not is_full)
        first = step * W.STEP
        tma.async_copy_global_to_shared(x, [row, first], at, xs.index(stage * 2))
        tma.async_copy_global_to_shared(x, [row + 64, first], at, xs.index(stage * 2 + 1), pred=is_full)
        tma.async_copy_global_to_shared(w, [of_w, first], at, ws.index(stage).slice(0, HALF))
        tma.async_copy_global_to_shared(w, [of_w + SECOND, first], at, ws.index(stage).slice(HALF, HALF))
        number += 1
    return number


@gluon_jit
def rescaled(sums, scales, tile, P: gl.constexpr, W: gl.constexpr):
    """Return sums [64, 128] of 8-bit numbers times the scales of their rows."""
    w_scale, x_scale = scales
    expert, column, row, left = tile
    pair = gl.arange(0, 64, layout=gl.SliceLayout(1, sums_layout(W.HALVES)))
    s_x = gl.load(x_scale + row + pair, mask=pair < left, other=0.0)
    place = gl.arange(0, 128, layout=gl.SliceLayout(0, sums_layout(W.HALVES)))
    if P.SPAN > 0:
        result = column + place % 64
        s_w = gl.load(w_scale + expert * P.N + place // 64 * P.SPAN + result, mask=result < P.SPAN, other=0.0)
    else:
        s_w = gl.load(w_scale + expert * P.N + column + place, mask=column + place < P.N, other=0.0)
    return sums * s_w[None, :] * s_x[:, None]


@gluon_jit
def sums_of(ring, tile, number, scales, P: gl.constexpr, W: gl.constexpr):
    """Return the sums [64, 32 · HALVES] of a tile by each half of its rows of W, and the number of the step after it.

    tile: an expert, the first column of results, the first row and the number of pairs.
    """
    ws, xs, ready, free = ring
    # Nothing reads what has scales of blocks.
    whole = (ws, xs, xs, ready, free)
    if ws.dtype == gl.int8:
        acc, _, number = integer_sums(whole, number, P, W)
    else:
        acc, _, number = float_sums((scales[0], 0), whole, number, P, W)
    sums = rescaled(acc.to(gl.float32), scales, tile, P, W)
    first, second = gl.split(sums.reshape([64, 2, 64]).permute([0, 2, 1]))
    return first, second, number


@gluon_jit
def pass_by(ring, number, P: gl.constexpr, W: gl.constexpr):
    """Give the steps of a tile back as they come; return the number of the step after them."""
    _, _, ready, free = ring
    NS: gl.constexpr = W.NS
    for _ in range((P.K + W.STEP - 1) // W.STEP):
        mbarrier.wait(ready.index(number % NS), number // NS & 1)
        mbarrier.arrive(free.index(number % NS), count=1)
        number += 1
    return number


@gluon_jit
def multiply(ring, found, number, operands, P: gl.constexpr, W: gl.constexpr):
    """Multiply and store the pairs of one group of four warps of a tile; return the number of the step after it."""
    scales, staged, y, work, num_tokens = operands
    expert, column, row, begin, count = found
    begin += W.GROUP * 64
    row += W.GROUP * 64
    left = count - begin
    if left > 0:
        if P.SPAN == 0:
            place = gl.arange(0, 64, layout=gl.SliceLayout(1, sums_layout(W.HALVES)))
            pairs = work.pairs + expert.to(gl.int64) * num_tokens + begin
            pair = gl.load(pairs + place, mask=place < left, other=-1)
        first, second, number = sums_of(ring, (expert, column, row, left), number, scales, P, W)
        if P.SPAN > 0:
            write_gated(first, second, staged.index(W.GROUP), y, (row, column, left), P)
        else:
            write_sums(first, y, pair, column, P)
            write_sums(second, y, pair, column + 32 * W.HALVES, P)
    else:
        number = pass_by(ring, number, P, W)
    return number


@gluon_jit
def write_gated(gate, up, staged, y, place, P: gl.constexpr):
    """Store silu(gate) · up [64, columns] of so many pairs at a row and a column, by way of shared memory."""
    row, column, left = place
    COLUMNS: gl.constexpr = gate.shape[1]
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    staged.store(silu_product(gate, up).to(y.dtype.element_ty))
    pair = gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
    column = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, copy))
    to = y + (row + pair).to(gl.int64)[:, None] * P.SPAN + column[None, :]
    gl.store(to, staged.load(copy), mask=(pair < left)[:, None] & (column < P.SPAN)[None, :])


@gluon_jit
def write_sums(sums, z, pair, column, P: gl.constexpr):
    """Store sums [64, columns] in the rows of pairs [64]; -1: there is none."""
    pair = gl.convert_layout(pair, gl.SliceLayout(1, sums.type.layout))
    column = column + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    to = z + pair.to(gl.int64)[:, None] * P.N + column[None, :]
    gl.store(to, sums, mask=(pair >= 0)[:, None] & (column < P.N)[None, :])
