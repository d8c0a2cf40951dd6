"""The tiles of `segments8.py`: which a program takes, how they are fetched and multiplied, and how they end."""

from __future__ import annotations

from typing import NamedTuple

from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    gl,
    gluon_jit,
    mbarrier,
    tma,
)
from photon_grpc.kernels.linear.wide8_sums import float_sums, integer_sums, sums_layout
from photon_grpc.kernels.moe.segment_work import (
    pass_by,
    tile_of,
    tiles_across,
    write_gated,
    write_sums,
)


class SegmentTile8(NamedTuple):
    """Constants that the kernel is compiled for, named as those of `wide8.WideTile8` where they are the same.

    HALVES of 64 rows of W of a tile, NS steps of STEP columns in flight, TURN steps of e4m3 that overlap. GROUP: of
    warps. PARTS of 128 pairs. BLOCKS: whether blocks have scales.
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
    return (32 if span else 64) * halves


@gluon_jit
def each_tile(ring, work, operands, BODY: gl.constexpr, P: gl.constexpr, W: gl.constexpr):
    """Take the tiles of this program in turn: the program of a group of four warps, or of the fetching one.

    BODY takes the ring, a tile, the number of its first step, `operands`, P and W, and returns the number of the step
    behind its last.
    """
    COLUMNS: gl.constexpr = columns_of(P.SPAN, W.HALVES)
    number = 0
    tiles = gl.load(work.size) * tiles_across(P.N, P.SPAN, COLUMNS)
    found = tile_of(work, gl.program_id(0), tiles, P, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        this = found
        # The next one is known when this one ends.
        found = tile_of(work, tile + gl.num_programs(0), tiles, P, COLUMNS)
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
def block_scales(source, further, P: gl.constexpr, W: gl.constexpr):
    """Load the scales of a tile and a step, `further` behind that of the source: of rows of W [128], of pairs [64].

    source: of W [E, K / 128, N / 128], those of x, from one column of theirs to the next; a tile as of `sums_of`; a
    step. Rows of gate, rows of up and a whole tile of others have one scale each. Without blocks nothing reads what is
    returned.
    """
    if W.BLOCKS:
        scales, tile, step = source
        w_scale, x_scale, x_stride = scales
        expert, column, row, left = tile
        step += further
        at = w_scale + (expert * ((P.K + 127) // 128) + step) * (P.N // 128)
        of_rows: gl.constexpr = gl.SliceLayout(0, sums_layout(W.HALVES))
        of_w = gl.full([128], gl.load(at + column // 128), gl.float32, of_rows)
        if P.SPAN > 0:
            of_up = gl.load(at + (column + P.SPAN) // 128)
            of_w = gl.where(gl.arange(0, 128, layout=of_rows) < 64, of_w, of_up)
        pair = gl.arange(0, 64, layout=gl.SliceLayout(1, sums_layout(W.HALVES)))
        return of_w, gl.load(x_scale + step * x_stride + row + pair, mask=pair < left, other=0.0)
    else:
        return further, 0


@gluon_jit
def rescaled(sums, scales, tile, P: gl.constexpr, W: gl.constexpr):
    """Return sums [64, 128] of 8-bit numbers times the scales of their rows."""
    w_scale, x_scale, _ = scales
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
    # There are no scales in the ring.
    whole = (ws, xs, None, ready, free)
    if ws.dtype == gl.int8:
        acc, _, number = integer_sums(whole, number, P, W)
    else:
        acc, _, number = float_sums((scales, tile), whole, number, block_scales, P, W)
    sums = acc.to(gl.float32)
    if not W.BLOCKS:
        sums = rescaled(sums, scales, tile, P, W)
    first, second = gl.split(sums.reshape([64, 2, 64]).permute([0, 2, 1]))
    return first, second, number


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
        number = pass_by(ring[2:], number, (P.K + W.STEP - 1) // W.STEP, W.NS)
    return number
