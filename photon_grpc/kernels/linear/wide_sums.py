"""The sums of `wide.py`: the ring of steps that one warp fetches, and the products of one group of four warps."""

from __future__ import annotations

from typing import Any

from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from photon_grpc.kernels.linear.boxes import box_layout
from photon_grpc.kernels.linear.cut import slice_columns
from photon_grpc.kernels.linear.decode import decoded, halves, packed_layout, unshifted
from photon_grpc.kernels.linear.handed import job_of, num_jobs
from photon_grpc.kernels.linear.sides import half_of
from photon_grpc.kernels.linear.tiles import num_pieces, stored_width
from photon_grpc.kernels.linear.wgmma import left_layout
from photon_grpc.kernels.linear.wide8_sums import place_of
from photon_grpc.kernels.linear.wide_tiles import rest_at_once, steps_at_once


@constexpr_function
def flat_layout() -> Any:
    """Return the same memory as it is without a swizzle."""
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@constexpr_function
def sums_layout(rows: int) -> Any:
    """Return the layout of a group's sums [64, rows] in registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@constexpr_function
def given_layout() -> Any:
    """Return the layout of sums [64, BM] in shared memory: eight neighbouring rows of a column in different banks."""
    return gl.SwizzledSharedLayout(4, 1, 8, [1, 0])


@constexpr_function
def rows_at_once(span: int, is_shared: bool) -> int:
    """Return the rows of W that one copy has: those of both groups of warps, if they are neighbours."""
    return 64 if is_shared or span % 64 else 128


@constexpr_function
def sides_at_once(span: int, is_shared: bool, groups: int) -> int:
    """Return the rows of W whose scales, or zeros, one copy has."""
    return 64 if groups > 1 else rows_at_once(span, is_shared)


@gluon_jit
def fetch_rows(source, number, column, at, to, P: gl.constexpr):
    """Begin the copy of the `number`-th rows of packed W from byte `column` on."""
    ROWS: gl.constexpr = to.shape[0]
    if P.SPAN == 0:
        tma.async_copy_global_to_shared(source, [number * ROWS, column], at, to)
    else:
        WIDTH: gl.constexpr = to.shape[1]
        pair = number * (ROWS // 2)
        pairs = to._reinterpret(to.dtype, [1, ROWS // 16, 2, 8, WIDTH], box_layout(5, 8, WIDTH))
        tma.async_copy_global_to_shared(source, [pair // P.SPAN, pair % P.SPAN // 8, 0, 0, column], at, pairs)


@gluon_jit
def fetch_sides(source, number, group, at, to, P: gl.constexpr):
    """Begin the copy of the scales or zeros of the `number`-th rows, from this group of columns on."""
    G: gl.constexpr = to.shape[1]
    ROWS: gl.constexpr = to.shape[2]
    if P.SPAN == 0:
        flat = to._reinterpret(to.dtype, [G, ROWS], box_layout(2, 16, 0))
        tma.async_copy_global_to_shared(source, [group, number * ROWS], at, flat)
    else:
        pair = number * (ROWS // 2)
        pairs = to._reinterpret(to.dtype, [G, 1, ROWS // 16, 2, 8], box_layout(5, 16, 0))
        tma.async_copy_global_to_shared(source, [group, pair // P.SPAN, pair % P.SPAN // 8, 0, 0], at, pairs)


@constexpr_function
def x_box() -> int:
    """Return the rows of x that are copied at once: a copy that reaches beyond the last row is slow."""
    return 32


@gluon_jit
def expect(at, num_boxes, BYTES: gl.constexpr, OF_BOX: gl.constexpr, MOST: gl.constexpr):
    """Expect BYTES and those of this many boxes of x, at most MOST."""
    for boxes in gl.static_range(1, MOST + 1):
        mbarrier.expect(at, BYTES + boxes * OF_BOX, pred=num_boxes == boxes)


@gluon_jit
def fetch_step(sources, ring, place, at, P: gl.constexpr, W: gl.constexpr):
    """Begin the copies of a step but those of x. place: the tile of W, boxes of x; at: the step, its stage."""
    tile, num_boxes = place
    step, stage = at
    w, _, scales, zeros, norm = sources
    ws, x_rows, of_scales, of_zeros, of_norm, ready, _ = ring
    xs = x_rows[0]
    WIDTH: gl.constexpr = stored_width(P.WEIGHT.BITS, 64)
    G: gl.constexpr = num_pieces(P.WEIGHT.GROUP, 64, P.K, P.SLICES)
    SIDES: gl.constexpr = 2 if P.WEIGHT.HAS_ZEROS else 1
    XS: gl.constexpr = 2 if W.IS_SHARED else 1
    HALF: gl.constexpr = (P.K + 63) // 64 // 2
    BYTES: gl.constexpr = 128 * (WIDTH + 2 * G * SIDES + (XS if P.WEIGHT.HAS_NORM else 0))
    MOST: gl.constexpr = (W.BM + W.MORE) // x_box()
    bar = ready.index(stage)
    if num_boxes == MOST:
        mbarrier.expect(bar, BYTES + 128 * (W.BM + W.MORE) * XS)
    else:
        expect(bar, num_boxes, BYTES, 128 * x_box() * XS, MOST - 1)
    # Copies of both groups' rows are one where they are neighbours.
    ROWS: gl.constexpr = rows_at_once(P.SPAN, W.IS_SHARED)
    SIDE_ROWS: gl.constexpr = sides_at_once(P.SPAN, W.IS_SHARED, G)
    rows_of_w = ws._reinterpret(ws.dtype, [W.NS * 128 // ROWS, ROWS, WIDTH], box_layout(2, 8, WIDTH))
    for group in gl.static_range(128 // ROWS):
        rows = tile if W.IS_SHARED else tile * (128 // ROWS) + group
        of_group = step + group * HALF if W.IS_SHARED else step
        fetch_rows(w, rows, of_group * WIDTH, bar, rows_of_w.index(stage * (128 // ROWS) + group), P)
    SIDES_SHAPE: gl.constexpr = [W.NS * 128 // SIDE_ROWS, 1, G, SIDE_ROWS]
    sides = of_scales._reinterpret(xs.dtype, SIDES_SHAPE, flat_layout())
    for group in gl.static_range(128 // SIDE_ROWS):
        rows = tile if W.IS_SHARED else tile * (128 // SIDE_ROWS) + group
        of_group = step + group * HALF if W.IS_SHARED else step
        of_columns = of_group * 64 // P.WEIGHT.GROUP if P.WEIGHT.GROUP > 0 else 0
        slot = stage * (128 // SIDE_ROWS) + group
        fetch_sides(scales, rows, of_columns, bar, sides.index(slot), P)
        if P.WEIGHT.HAS_ZEROS:
            of_zero = of_zeros._reinterpret(xs.dtype, SIDES_SHAPE, flat_layout())
            fetch_sides(zeros, rows, of_columns, bar, of_zero.index(slot), P)
    if P.WEIGHT.HAS_NORM:
        for part in gl.static_range(XS):
            flat = of_norm.index(stage * XS + part)._reinterpret(xs.dtype, [1, 64], box_layout(2, 16, 0))
            tma.async_copy_global_to_shared(norm, [0, (step + part * HALF) * 64], bar, flat)


@gluon_jit
def fetch_x(x, ring, place, at, P: gl.constexpr, W: gl.constexpr):
    """Begin the copies of x of a step: of a whole tile at once, else by boxes; what is behind these stays as it is."""
    row, num_boxes = place
    if num_boxes == (W.BM + W.MORE) // x_box():
        fetch_whole_x(x, ring, row, at, P, W)
    else:
        fetch_boxes(x[0], ring, place, at, P, W)


@gluon_jit
def fetch_whole_x(x, ring, row, at, P: gl.constexpr, W: gl.constexpr):
    """Begin the copies of x of a step where a tile has all of its rows."""
    step, stage = at
    xs, more = ring[1]
    bar = ring[5].index(stage)
    XS: gl.constexpr = 2 if W.IS_SHARED else 1
    HALF: gl.constexpr = (P.K + 63) // 64 // 2
    for part in gl.static_range(XS):
        tma.async_copy_global_to_shared(x[1], [row, (step + part * HALF) * 64], bar, xs.index(stage * XS + part))
    if W.MORE == W.BM:
        tma.async_copy_global_to_shared(x[1], [row + W.BM, step * 64], bar, more.index(stage))
    elif W.MORE:
        fetch_more_boxes(x[0], ring, (row, W.MORE // x_box()), at, W)


@gluon_jit
def fetch_boxes(x, ring, place, at, P: gl.constexpr, W: gl.constexpr):
    """Begin the copies of x of a step by boxes, of a tile that has not all of its rows."""
    row, num_boxes = place
    step, stage = at
    xs = ring[1][0]
    XS: gl.constexpr = 2 if W.IS_SHARED else 1
    HALF: gl.constexpr = (P.K + 63) // 64 // 2
    BOX: gl.constexpr = x_box()
    BOXES: gl.constexpr = W.BM // BOX
    boxes = xs._reinterpret(xs.dtype, [W.NS * XS * BOXES, BOX, 64], box_layout(2, 16, 128))
    for part in gl.static_range(XS):
        for box in gl.static_range(BOXES):
            to = boxes.index((stage * XS + part) * BOXES + box)
            first = [row + box * BOX, (step + part * HALF) * 64]
            tma.async_copy_global_to_shared(x, first, ring[5].index(stage), to, pred=box < num_boxes)
    if W.MORE:
        fetch_more_boxes(x, ring, (row, num_boxes - BOXES), at, W)


@gluon_jit
def fetch_more_boxes(x, ring, place, at, W: gl.constexpr):
    """Begin the copies of the first boxes of the MORE rows of x of a step; place: row of the tile, number of boxes."""
    row, num_boxes = place
    step, stage = at
    more = ring[1][1]
    BOX: gl.constexpr = x_box()
    MOST: gl.constexpr = W.MORE // BOX
    boxes = more._reinterpret(more.dtype, [W.NS * MOST, BOX, 64], box_layout(2, 16, 128))
    for box in gl.static_range(MOST):
        first = [row + W.BM + box * BOX, step * 64]
        to = boxes.index(stage * MOST + box)
        tma.async_copy_global_to_shared(x, first, ring[5].index(stage), to, pred=box < num_boxes)


@gluon_jit
def produce(sources, ring, rows, P: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr):
    """Fetch the tiles of this program, step by step: the program of the fetching warp.

    As much of W as there are stages is on its way before the kernel before has written x. rows: of x, and its tiles.
    """
    free = ring[6]
    num_rows, x_tiles = rows
    SLICE_STEPS: gl.constexpr = slice_columns(P.K, P.SLICES) // 64
    N_TILES: gl.constexpr = P.N // (64 if W.IS_SHARED else 128)
    PARTS: gl.constexpr = P.SLICES if W.IS_SPLIT else 1
    XS: gl.constexpr = 2 if W.IS_SHARED else 1
    BOX: gl.constexpr = x_box()
    ROWS: gl.constexpr = W.BM + W.MORE
    BLOCKS: gl.constexpr = num_blocks(P.K, W.IS_HANDED)
    BLOCK: gl.constexpr = (P.K + 63) // 64 // BLOCKS
    num_tiles = N_TILES * x_tiles * PARTS
    count = 0
    for job in range(num_jobs(num_tiles, BLOCKS, W.IS_HANDED)):
        number, first, last = job_of(job, num_tiles, BLOCKS, W.IS_HANDED)
        n_tile, x_tile = place_of(number // PARTS, x_tiles, N_TILES)
        first *= BLOCK
        last *= BLOCK
        if W.IS_SPLIT:
            first = number % PARTS * SLICE_STEPS
            last = gl.minimum(first + SLICE_STEPS, last)
        if W.IS_SHARED:
            last = last // XS
        num_boxes = gl.minimum((num_rows - x_tile * ROWS + BOX - 1) // BOX, ROWS // BOX)
        ahead = first
        if count == 0:
            ahead = gl.minimum(first + W.NS, last)
            for step in range(first, ahead):
                fetch_step(sources, ring, (n_tile, num_boxes), (step, step - first), P, W)
            if PDL:
                gdc_wait()
                gdc_launch_dependents()
        for step in range(first, last):
            stage = count % W.NS
            if step >= ahead:
                mbarrier.wait(free.index(stage), (count // W.NS + 1) & 1)
                fetch_step(sources, ring, (n_tile, num_boxes), (step, stage), P, W)
            fetch_x(sources[1], ring, (x_tile * ROWS, num_boxes), (step, stage), P, W)
            count += 1


@gluon_jit
def multiply_step(acc, at, IS_FIRST: gl.constexpr, P: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr):
    """Return acc with a step's product, the second half of its columns still being multiplied.

    Half a step is decoded while the one before it is multiplied; the stage before is free when that is done.
    """
    ring, count = at
    ws, x_rows, of_scales, of_zeros, of_norm, ready, free = ring
    WIDTH: gl.constexpr = stored_width(P.WEIGHT.BITS, 64)
    G: gl.constexpr = num_pieces(P.WEIGHT.GROUP, 64, P.K, P.SLICES)
    PIECES: gl.constexpr = W.PIECES
    COLUMNS: gl.constexpr = 64 // PIECES
    G_OF_PIECE: gl.constexpr = G // PIECES if G > 1 else 1
    packed: gl.constexpr = packed_layout(1, 64, WIDTH, 4)
    layout: gl.constexpr = left_layout(4)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(W.BM), 2)
    stage = count % W.NS
    place = stage * 2 + GROUP
    mbarrier.wait(ready.index(stage), count // W.NS & 1)
    words = ws.index(place).load(gl.SliceLayout(0, packed))[None, :, :]
    words = halves(words, 4) if PIECES == 2 else (words,)
    scales = of_scales.index(place)
    zeros = of_zeros.index(place) if P.WEIGHT.HAS_ZEROS else None
    place = stage * 2 + GROUP if W.IS_SHARED else stage
    norm = of_norm.index(place) if P.WEIGHT.HAS_NORM else None
    x = x_rows[0].index(place)
    acc, more = acc
    for piece in gl.static_range(PIECES):
        scale = half_of(scales, piece, 1) if PIECES == 2 else scales
        zero = half_of(zeros, piece, 1) if PIECES == 2 else zeros
        of_columns = half_of(norm, piece, 2) if PIECES == 2 else norm
        a = decoded(words[piece], scale, zero, of_columns, G_OF_PIECE, P, layout)
        a = gl.convert_layout(a.reshape([64, COLUMNS]), a_layout, assert_trivial=True)
        of_piece = x.slice(piece * COLUMNS, COLUMNS, dim=1)
        acc = warpgroup_mma(a, of_piece.permute([1, 0]), acc, is_async=True)
        if W.MORE:
            of_piece = x_rows[1].index(stage).slice(piece * COLUMNS, COLUMNS, dim=1)
            a = gl.convert_layout(a, gl.DotOperandLayout(0, sums_layout(W.MORE), 2), assert_trivial=True)
            more = warpgroup_mma(a, of_piece.permute([1, 0]), more, is_async=True)
            acc, more = warpgroup_mma_wait(2, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        if piece == 0 and not IS_FIRST:
            mbarrier.arrive(free.index((count + W.NS - 1) % W.NS), count=1)
    return acc, more


@gluon_jit
def multiply_steps(acc, at, steps, P: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr):
    """Return acc with the products of the next steps, and the number of the step behind them; at: ring, this number.

    acc: sums [64, BM] and [64, MORE]; without MORE the second is not used.
    """
    AT_ONCE: gl.constexpr = steps_at_once(P.K, P.SLICES)
    ring, count = at
    acc, more = acc
    for _ in range(steps // AT_ONCE):
        acc, more = multiply_block((acc, more), (ring, count), AT_ONCE, P, W, GROUP)
        count += AT_ONCE
    REST: gl.constexpr = rest_at_once(P.K, P.SLICES)
    if REST:
        acc, more = multiply_block((acc, more), (ring, count), REST, P, W, GROUP)
        count += REST
    return acc, more, count


@gluon_jit
def multiply_block(acc, at, NUM: gl.constexpr, P: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr):
    """Return acc with the products of NUM steps, all of them waited for."""
    ring, count = at
    acc, more = acc
    for step in gl.static_range(NUM):
        acc, more = multiply_step((acc, more), (ring, count + step), step == 0, P, W, GROUP)
    if W.MORE:
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring[6].index((count + W.NS + NUM - 1) % W.NS), count=1)
    return acc, more


@gluon_jit
def sums_of(ring, count, steps, P: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr):
    """Return the sums [64, BM] and [64, MORE] of the next steps, and the number of the step behind them."""
    acc, more, count = multiply_steps(no_sums(W), (ring, count), steps, P, W, GROUP)
    acc, more = whole_sums((acc, more), ring, P, W)
    return acc, more, count


@gluon_jit
def whole_sums(acc, ring, P: gl.constexpr, W: gl.constexpr):
    """Return sums without the scale of `decoded` weights."""
    kind: gl.constexpr = ring[1][0].dtype
    acc, more = acc
    if W.MORE:
        more = unshifted(more, kind, P)
    return unshifted(acc, kind, P), more


@gluon_jit
def no_sums(W: gl.constexpr):
    BM: gl.constexpr = W.BM
    MORE: gl.constexpr = W.MORE
    acc = gl.zeros([64, BM], gl.float32, sums_layout(BM))
    more = acc
    if MORE:
        more = gl.zeros([64, MORE], gl.float32, sums_layout(MORE))
    return acc, more


@constexpr_function
def num_blocks(k: int, is_handed: bool) -> int:
    """Return the parts of a tile's steps that may be those of two programs."""
    return -(-k // 64) // steps_at_once(k, 1) if is_handed else 1


@gluon_jit
def give(sums, given, number):
    """Give the first group of warps the `number`-th sums, once those before are read."""
    memory, is_given, is_read = given
    mbarrier.wait(is_read, number & 1)
    memory.store(sums)
    mbarrier.arrive(is_given, count=1)


@gluon_jit
def add_given(sums, given, number):
    """Return sums with the `number`-th of the second group added.

    given: memory for them, a barrier that says they are there, and one that they are read.
    """
    memory, is_given, is_read = given
    mbarrier.wait(is_given, (number + 1) & 1)
    sums = sums + memory.load(sums.type.layout)
    mbarrier.arrive(is_read, count=1)
    return sums
