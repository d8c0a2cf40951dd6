"""The sums of `wide.py`: the ring of steps that one warp fetches, and the products of one group of four warps."""

from __future__ import annotations

from typing import Any

from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    gl,
    gluon_jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from photon_grpc.kernels.linear.cut import slice_columns
from photon_grpc.kernels.linear.decode import decoded, halves, packed_layout, unshifted
from photon_grpc.kernels.linear.sides import half_of
from photon_grpc.kernels.linear.tiles import num_pieces, stored_width
from photon_grpc.kernels.linear.wgmma import left_layout
from photon_grpc.kernels.linear.wide8_sums import place_of


@constexpr_function
def box_layout(rank: int, bits: int, swizzle: int) -> Any:
    """Return the layout of what is copied in shared memory: `swizzle` bytes are a row, or 0."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


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
def num_slice_steps(k: int, slices: int, part: int) -> int:
    """Return the steps of a slice."""
    columns = slice_columns(k, slices)
    return -(-min(columns, k - part * columns) // 64)


@gluon_jit
def fetch_rows(source, number, column, at, to, P: gl.constexpr):
    """Begin the copy of a group's rows of packed W from byte `column` on."""
    if P.SPAN == 0:
        tma.async_copy_global_to_shared(source, [number * 64, column], at, to)
    else:
        WIDTH: gl.constexpr = to.shape[1]
        pair = number * 32
        pairs = to._reinterpret(to.dtype, [1, 4, 2, 8, WIDTH], box_layout(5, 8, WIDTH))
        tma.async_copy_global_to_shared(source, [pair // P.SPAN, pair % P.SPAN // 8, 0, 0, column], at, pairs)


@gluon_jit
def fetch_sides(source, number, group, at, to, P: gl.constexpr):
    """Begin the copy of the scales or zeros of a group's rows, from this group of columns on."""
    G: gl.constexpr = to.shape[1]
    if P.SPAN == 0:
        flat = to._reinterpret(to.dtype, [G, 64], box_layout(2, 16, 0))
        tma.async_copy_global_to_shared(source, [group, number * 64], at, flat)
    else:
        pair = number * 32
        pairs = to._reinterpret(to.dtype, [G, 1, 4, 2, 8], box_layout(5, 16, 0))
        tma.async_copy_global_to_shared(source, [group, pair // P.SPAN, pair % P.SPAN // 8, 0, 0], at, pairs)


@gluon_jit
def produce(sources, ring, x_tiles, P: gl.constexpr, W: gl.constexpr):
    """Fetch the tiles of this program, step by step: the program of the fetching warp."""
    w, x, scales, zeros, norm = sources
    ws, xs, of_scales, of_zeros, of_norm, ready, free = ring
    COLUMNS: gl.constexpr = slice_columns(P.K, P.SLICES)
    STEPS: gl.constexpr = (P.K + 63) // 64
    SLICE_STEPS: gl.constexpr = COLUMNS // 64
    N_TILES: gl.constexpr = P.N // (64 if W.IS_SHARED else 128)
    PARTS: gl.constexpr = P.SLICES if W.IS_SPLIT else 1
    WIDTH: gl.constexpr = stored_width(P.WEIGHT.BITS, 64)
    G: gl.constexpr = num_pieces(P.WEIGHT.GROUP, 64, P.K, P.SLICES)
    SIDES: gl.constexpr = 2 if P.WEIGHT.HAS_ZEROS else 1
    XS: gl.constexpr = 2 if W.IS_SHARED else 1
    BYTES: gl.constexpr = 128 * (WIDTH + W.BM * XS + 2 * G * SIDES + (XS if P.WEIGHT.HAS_NORM else 0))
    kind: gl.constexpr = xs.dtype
    count = 0
    for number in range(gl.program_id(0), N_TILES * x_tiles * PARTS, gl.num_programs(0)):
        n_tile, x_tile = place_of(number // PARTS, x_tiles, N_TILES)
        first = number % PARTS * SLICE_STEPS
        last = gl.minimum(first + SLICE_STEPS, STEPS) if W.IS_SPLIT else STEPS // XS
        for step in range(first, last):
            stage = count % W.NS
            mbarrier.wait(free.index(stage), (count // W.NS + 1) & 1)
            at = ready.index(stage)
            mbarrier.expect(at, BYTES)
            for group in gl.static_range(2):
                place = stage * 2 + group
                rows = n_tile if W.IS_SHARED else n_tile * 2 + group
                of_group = step + group * SLICE_STEPS if W.IS_SHARED else step
                of_columns = of_group * 64 // P.WEIGHT.GROUP if P.WEIGHT.GROUP > 0 else 0
                fetch_rows(w, rows, of_group * WIDTH, at, ws.index(place), P)
                fetch_sides(scales, rows, of_columns, at, of_scales.index(place), P)
                if P.WEIGHT.HAS_ZEROS:
                    fetch_sides(zeros, rows, of_columns, at, of_zeros.index(place), P)
            for part in gl.static_range(XS):
                place = stage * XS + part
                column = (step + part * SLICE_STEPS) * 64
                tma.async_copy_global_to_shared(x, [x_tile * W.BM, column], at, xs.index(place))
                if P.WEIGHT.HAS_NORM:
                    flat = of_norm.index(place)._reinterpret(kind, [1, 64], box_layout(2, 16, 0))
                    tma.async_copy_global_to_shared(norm, [0, column], at, flat)
            count += 1


@gluon_jit
def multiply_step(acc, ring, count, P: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr):
    """Return acc with a step's product; one half of its columns is decoded while the other is multiplied."""
    ws, xs, of_scales, of_zeros, of_norm, ready, _ = ring
    WIDTH: gl.constexpr = stored_width(P.WEIGHT.BITS, 64)
    G: gl.constexpr = num_pieces(P.WEIGHT.GROUP, 64, P.K, P.SLICES)
    HALF_G: gl.constexpr = G // 2 if G > 1 else 1
    packed: gl.constexpr = packed_layout(1, 64, WIDTH, 4)
    layout: gl.constexpr = left_layout(4)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    stage = count % W.NS
    place = stage * 2 + GROUP
    mbarrier.wait(ready.index(stage), count // W.NS & 1)
    words = halves(ws.index(place).load(gl.SliceLayout(0, packed))[None, :, :], 4)
    scales = of_scales.index(place)
    zeros = of_zeros.index(place) if P.WEIGHT.HAS_ZEROS else None
    place = stage * 2 + GROUP if W.IS_SHARED else stage
    norm = of_norm.index(place) if P.WEIGHT.HAS_NORM else None
    x = xs.index(place)
    for half in gl.static_range(2):
        scale = half_of(scales, half, 1)
        zero = half_of(zeros, half, 1)
        a = decoded(words[half], scale, zero, half_of(norm, half, 2), HALF_G, P, layout)
        a = gl.convert_layout(a.reshape([64, 32]), a_layout, assert_trivial=True)
        acc = warpgroup_mma(a, x.slice(half * 32, 32, dim=1).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(1 - half, deps=[acc])
    return acc


@gluon_jit
def multiply_steps(ring, count, steps, P: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr):
    """Return the sums [64, BM] of the next steps, and the number of the step behind them."""
    free = ring[6]
    BM: gl.constexpr = W.BM
    acc = gl.zeros([64, BM], gl.float32, sums_layout(BM))
    for _ in range(steps):
        acc = multiply_step(acc, ring, count, P, W, GROUP)
        mbarrier.arrive(free.index(count % W.NS), count=1)
        count += 1
    return unshifted(acc, ring[1].dtype, P), count


@gluon_jit
def give(sums, given, number):
    """Give the sums of the `number`-th tile to the first group of warps, once those before are read."""
    memory, is_given, is_read = given
    mbarrier.wait(is_read, number & 1)
    memory.store(sums)
    mbarrier.arrive(is_given, count=1)


@gluon_jit
def add_given(sums, given, number):
    """Return the sums of the `number`-th tile, those of the second group added.

    given: memory for them, a barrier that says they are there, and one that they are read.
    """
    memory, is_given, is_read = given
    mbarrier.wait(is_given, (number + 1) & 1)
    sums = sums + memory.load(sums.type.layout)
    mbarrier.arrive(is_read, count=1)
    return sums
