"""Gluon kernel for y = W x with both in 8 bits, at any number of rows of x.

W is the 64- or 128-row operand of wgmma. Where a W of few rows would leave multiprocessors idle, a program takes 32 of
them, and x is the operand of 64 rows; with scales of blocks it is the first operand from 64 rows on, as a thread then
has two rows of x and their scales. The bits are the same.

`products8.py` has the formula and the launchers.

One program takes BN rows of W over one slice of K, or over all of it, for BM rows of x. As in `wgmma.py`, tiles of W
are in flight before the programmatic wait and x follows after it in a separate pipeline. Places of the ring hold 128
columns; a step has BK / 128 of them.

int8: sums are int32 and exact, however K is cut; slices are merged as in `wgmma.py`.
fp8:  sums of 128 columns are made by the tensor core, which keeps fewer bits than float32 between its products, from
zero; they are added forwards in float32. K is never cut otherwise. With scales of 128 columns each sum is multiplied by
its scale when it is added, by fma(sum, s_x · s_w, total).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from photon_grpc.kernels.lang.gluon import (
    async_copy,
    constexpr_function,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from photon_grpc.kernels.lang.squares import totals_at_once
from photon_grpc.kernels.linear.epilogue import normalised, tile_layout, tile_rows
from photon_grpc.kernels.linear.wgmma import merge_slices, turned

#: Columns of K that fp8 sums without rounding to float32, that a scale covers, and that a place of the ring holds.
CHUNK = 128


class Eight(NamedTuple):
    """Constants of a kernel beside its Problem.

    BLOCKS: each 128 columns of a row of x and each 128 x 128 of W have a scale; else each row of both. PARTS: programs
    share x as well, BM rows each, and store the plain product; else x has at most BM rows.
    """

    BLOCKS: bool = False
    PARTS: bool = False


@constexpr_function
def x_rows(rows: int, tokens: int) -> int:
    """Return the rows of x in shared memory for so many of W and of x; no result is of those behind `tokens`."""
    return tokens if rows >= 64 else 64


@constexpr_function
def slice_steps(k: int, step: int, slices: int) -> int:
    """Return the steps of a slice of K; the last slice may have less to multiply, and multiplies zeros instead."""
    return -(-k // (step * slices))


@constexpr_function
def product_layout(rows: int, tokens: int, warps: int) -> Any:
    """Return the layout of the sums of a tile: groups of four warps side by side along rows of the first operand."""
    along_rows = min(warps, rows // 16)
    # The compiler of Triton 3.6 fails on 256 columns of int8.
    columns = min(128, tokens * along_rows // warps)
    warps_of = [along_rows, warps // along_rows]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=warps_of, instr_shape=[16, columns, 32])


@constexpr_function
def copy_layout(rows: int, warps: int) -> Any:
    """Return the layout in which threads copy [rows, 128] bytes, up to 16 bytes each."""
    each = min(16, rows * CHUNK // (32 * warps))
    across = min(32, CHUNK // each)
    return gl.BlockedLayout([1, each], [32 // across, across], [warps, 1], [1, 0])


@gluon_jit
def multiply(ws, xs, place, acc, USE: gl.constexpr, TURNED: gl.constexpr):
    """Begin the product of the 128 columns at a place of the ring, added to acc if USE."""
    w = ws.index(place)
    x = xs.index(place)
    if TURNED:
        return warpgroup_mma(x, w.permute([1, 0]), acc, use_acc=USE, is_async=True)
    else:
        return warpgroup_mma(w, x.permute([1, 0]), acc, use_acc=USE, is_async=True)


@gluon_jit
def promote(total, part, scales, place, out: gl.constexpr, TURNED: gl.constexpr):
    """Return total + part, part multiplied by the scales of its 128 columns."""
    of_x, of_w = scales
    W_AXIS: gl.constexpr = 1 if TURNED else 0
    of_rows: gl.constexpr = gl.SliceLayout(1 - W_AXIS, out)
    both = of_w.index(place)
    row = gl.arange(0, part.shape[W_AXIS], layout=of_rows)
    s_w = gl.where(row % 16 < 8, both.slice(0, 1).load(of_rows), both.slice(8, 1).load(of_rows))
    s_x = of_x.index(place).load(gl.SliceLayout(W_AXIS, out))
    factor = s_x[:, None] * s_w[None, :] if TURNED else s_x[None, :] * s_w[:, None]
    return gl.fma(part, factor, total)


@gluon_jit
def fetch_step(tiles, source, scales, step, within, ROWS: gl.constexpr, CHUNKS: gl.constexpr, PLACES: gl.constexpr):
    """Begin the copies of a step's columns to its places, zeros from K on, and of their scales.

    scales: places, sources, elements from those of 128 columns to the next, or None. within: columns, rows, K, or None.
    """
    for c in gl.static_range(PLACES):
        chunk = step * PLACES + c
        place = chunk % tiles.shape[0]
        first = chunk * 128
        to = tiles.index(place).slice(0, ROWS)
        if within is None:
            async_copy.async_copy_global_to_shared(to, source + first)
        else:
            column, row, end = within
            inside = (column + first < end)[None, :] & (row >= 0)[:, None]
            async_copy.async_copy_global_to_shared(to, source + first, mask=inside)
        if scales is not None:
            places, of_scales, stride = scales
            if CHUNKS % PLACES:
                chunk = gl.minimum(chunk, CHUNKS - 1)
            to_scales = places.index(place).slice(0, of_scales.shape[0])
            async_copy.async_copy_global_to_shared(to_scales, of_scales + chunk * stride)


@gluon_jit
def load_w_scales(w_scale, P: gl.constexpr, TILE: gl.constexpr):
    """Load the scales [BN] of the rows of W of a tile."""
    whole: gl.constexpr = tile_layout(TILE.BN, P.BM, TILE.KW, P.SPAN > 0)
    return gl.load(w_scale + tile_rows(gl.program_id(0), TILE.BN, P.SPAN, gl.SliceLayout(1, whole)))


@gluon_jit
def load_x_scales(x_scale, P: gl.constexpr, TILE: gl.constexpr):
    """Load the scales [BM] of rows of x."""
    whole: gl.constexpr = tile_layout(TILE.BN, P.BM, TILE.KW, P.SPAN > 0)
    return gl.load(x_scale + gl.arange(0, P.BM, layout=gl.SliceLayout(0, whole)))


@gluon_jit
def wgmma8_kernel(
    w, w_scale, bias, x, x_scale, scale_stride, y, num_rows, eps, partial, operands, partials,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, E: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply W [N, K] by x [>= BM, K] and by their scales.

    The grid is (N // BN, SLICES), or (N // BN, 1, parts of x), with 4 warps, or 8 if BN is 128 or BM 128 and more. BN
    below 64: BM is 64 at most.

    w_scale float32 [N], with BLOCKS [K / 128, N / 128]; x_scale float32 [>= BM], with BLOCKS [K / 128, >= BM], rows
    `scale_stride` elements apart. LOAD and STORE are a pair of `epilogue.py`, `operands` what they take; P is a
    Problem, TILE a Tile, E an Eight. eps: None without a norm. partial: the sums of squares of x by `squares.py`, with
    a norm. partials: slices (int32) and counters of `merge_slices`, None with SLICES 1.
    """
    K: gl.constexpr = P.K
    BM: gl.constexpr = P.BM
    BN: gl.constexpr = TILE.BN
    KW: gl.constexpr = TILE.KW
    NS: gl.constexpr = TILE.NS
    PLACES: gl.constexpr = TILE.BK // 128
    CHUNKS: gl.constexpr = (K + 127) // 128
    STEPS: gl.constexpr = slice_steps(K, TILE.BK, P.SLICES)
    IS_EVEN: gl.constexpr = STEPS * TILE.BK * P.SLICES == K
    kind: gl.constexpr = w.dtype.element_ty
    IS_INT: gl.constexpr = kind == gl.int8
    IS_TURNED: gl.constexpr = BN < 64 or (E.BLOCKS and BM >= 64)
    X_ROWS: gl.constexpr = x_rows(BN, BM)
    SUMS: gl.constexpr = [X_ROWS, BN] if IS_TURNED else [BN, BM]
    out: gl.constexpr = product_layout(X_ROWS if IS_TURNED else BN, BN if IS_TURNED else BM, KW)
    of_w: gl.constexpr = copy_layout(BN, KW)
    of_x: gl.constexpr = copy_layout(BM, KW)
    swizzle: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    ws = gl.allocate_shared_memory(kind, [NS * PLACES, BN, 128], swizzle)
    xs = gl.allocate_shared_memory(kind, [NS * PLACES, X_ROWS, 128], swizzle)
    if E.PARTS:
        first_token = gl.program_id(2) * BM
        x += first_token.to(gl.int64) * K
        x_scale += first_token
        y += first_token.to(gl.int64) * P.N
        num_rows -= first_token
    begin = gl.program_id(1) * (STEPS * TILE.BK)
    w_row = tile_rows(gl.program_id(0), BN, P.SPAN, gl.SliceLayout(1, of_w))
    w_column = begin + gl.arange(0, 128, layout=gl.SliceLayout(0, of_w))
    x_row = gl.arange(0, BM, layout=gl.SliceLayout(1, of_x))
    x_column = begin + gl.arange(0, 128, layout=gl.SliceLayout(0, of_x))
    wp = w + w_row.to(gl.int64)[:, None] * K + w_column[None, :]
    xp = x + x_row[:, None] * K + x_column[None, :]
    w_within = None if IS_EVEN else (w_column, w_row, K)
    x_within = None if IS_EVEN else (x_column, x_row, K)
    w_scales, x_scales = None, None
    if E.BLOCKS:
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [KW], [0])
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        sxs = gl.allocate_shared_memory(gl.float32, [NS * PLACES, X_ROWS], plain)
        sws = gl.allocate_shared_memory(gl.float32, [NS * PLACES, 16], plain)
        x_scales = (sxs, x_scale + gl.arange(0, BM, layout=flat), scale_stride)
        # Rows 0 and 8 of a tile are in the blocks of the first rows of its pairs and of the second, or in the only one.
        block = tile_rows(gl.program_id(0) * (BN // 16), 16, P.SPAN, flat) // 128
        w_scales = (sws, w_scale + block, P.N // 128)
    for s in gl.static_range(NS - 2):
        if s < STEPS:
            fetch_step(ws, wp, w_scales, s, w_within, BN, CHUNKS, PLACES)
        async_copy.commit_group()
    whole: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0)
    # Tiles that would take half of the registers are loaded when the product no longer needs them.
    AHEAD: gl.constexpr = BM * BN <= KW * 1024
    if AHEAD and not E.BLOCKS:
        s_w = load_w_scales(w_scale, P, TILE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(NS - 2):
        if s < STEPS:
            fetch_step(xs, xp, x_scales, s, x_within, BM, CHUNKS, PLACES)
        async_copy.commit_group()
    if AHEAD and not E.BLOCKS:
        s_x = load_x_scales(x_scale, P, TILE)
    if AHEAD:
        ahead = LOAD((y, operands, num_rows, (gl.program_id(0), 0)), P, TILE)
    if AHEAD and eps is not None:
        squares = totals_at_once(partial, K, BM, KW)
    acc = gl.zeros(SUMS, gl.int32 if IS_INT else gl.float32, out)
    nothing = gl.zeros(SUMS, gl.int32 if IS_INT else gl.float32, out)
    for i in range(STEPS):
        async_copy.wait_group(NS - 3)
        fence_async_shared()
        place = i % NS * PLACES
        if IS_INT:
            for c in gl.static_range(PLACES):
                acc = multiply(ws, xs, place + c, acc, True, IS_TURNED)
            # This step is multiplied while the one before it is done. The one before that was done in every warp when
            # it passed the barrier after the wait: its place is free.
            acc = warpgroup_mma_wait(PLACES, deps=[acc])
        else:
            first = multiply(ws, xs, place, nothing, False, IS_TURNED)
            if PLACES == 2:
                second = multiply(ws, xs, place + 1, nothing, False, IS_TURNED)
        if i + NS - 2 < STEPS:
            fetch_step(ws, wp, w_scales, i + NS - 2, w_within, BN, CHUNKS, PLACES)
            fetch_step(xs, xp, x_scales, i + NS - 2, x_within, BM, CHUNKS, PLACES)
        async_copy.commit_group()
        if not IS_INT:
            part = warpgroup_mma_wait(PLACES - 1, deps=[first])
            acc = promote(acc, part, (sxs, sws), place, out, IS_TURNED) if E.BLOCKS else acc + part
            if PLACES == 2:
                part = warpgroup_mma_wait(0, deps=[second])
                acc = promote(acc, part, (sxs, sws), place + 1, out, IS_TURNED) if E.BLOCKS else acc + part
    if IS_INT:
        acc = warpgroup_mma_wait(0, deps=[acc])
    apart: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0 and P.SLICES == 1)
    tile = turned(acc, apart, P, TILE) if IS_TURNED else gl.convert_layout(acc, apart)
    is_last = True
    if P.SLICES > 1:
        is_last, tile = merge_slices(tile, partials, P, TILE)
    if is_last:
        sums = gl.convert_layout(tile, whole).to(gl.float32)
        if not AHEAD and not E.BLOCKS:
            s_w = load_w_scales(w_scale, P, TILE)
            s_x = load_x_scales(x_scale, P, TILE)
        if not E.BLOCKS:
            sums = sums * s_w[:, None] * s_x[None, :]
        if not AHEAD:
            ahead = LOAD((y, operands, num_rows, (gl.program_id(0), 0)), P, TILE)
        if not AHEAD and eps is not None:
            squares = totals_at_once(partial, K, BM, KW)
        if eps is not None:
            sums = normalised(sums, squares, (eps, bias), y.dtype.element_ty, P, TILE)
        STORE(sums, ahead, (y, operands, num_rows, (gl.program_id(0), 0)), P, TILE)
