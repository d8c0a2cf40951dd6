"""Gluon kernel for y = W x with 16 to 128 rows of x, W the 64- or 128-row operand of wgmma.

Where a W of few rows would leave multiprocessors idle, a program takes 16 or 32 of them, and x is the operand of 64
rows. The bits are the same.

`fused_linear.py` has the formula and the launchers.

One program takes BN rows of W over one slice of K (`cut.py`). As in `gemv.py`, tiles of W are in flight before the
programmatic wait and x follows after it in a separate pipeline. Each of several slices stores its sums in float32, and
the last to finish adds them all in the order of their numbers.
"""

from __future__ import annotations

from typing import Any

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
from photon_grpc.kernels.linear.cut import slice_columns
from photon_grpc.kernels.linear.decode import decoded, halves, packed_layout, packed_swizzle, unshifted
from photon_grpc.kernels.linear.epilogue import normalised, tile_layout, tile_rows
from photon_grpc.kernels.linear.gemv import fetch
from photon_grpc.kernels.linear.sides import (
    fetch_sides,
    half_of,
    of_step,
    packed_columns,
    packed_left,
    packed_pointers,
    ring_of_groups,
    ring_of_norm,
)
from photon_grpc.kernels.linear.tiles import num_pieces, stored_width


@gluon_jit
def merge_slices(tile, partials, P: gl.constexpr, TILE: gl.constexpr):
    """Store this slice; if it is the last to finish, read all: returns (is last, sums [BN, BM]).

    Both are in a `tile_layout` without pairs, whose neighbours in a thread are neighbours in memory. slices float32
    [tiles, SLICES, BN · BM]; counters int32 [tiles], zero before and after.
    """
    slices, counters = partials
    BM: gl.constexpr = P.BM
    BN: gl.constexpr = TILE.BN
    SLICES: gl.constexpr = P.SLICES
    SIZE: gl.constexpr = BN * BM
    apart: gl.constexpr = tile_layout(BN, BM, TILE.KW, False)
    program = gl.program_id(0)
    row = gl.arange(0, BN, layout=gl.SliceLayout(1, apart))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, apart))
    within = token[None, :] * BN + row[:, None]
    of_tile = slices + program * (SLICES * SIZE)
    gl.store(of_tile + gl.program_id(1) * SIZE + within, tile)
    gl.thread_barrier()
    arrived = gl.atomic_add(counters + program, 1, sem="acq_rel")
    is_last = arrived == SLICES - 1
    if is_last:
        gl.store(counters + program, 0)
        tile = gl.load(of_tile + within, cache_modifier=".cg")
        for part in gl.static_range(1, SLICES):
            tile += gl.load(of_tile + part * SIZE + within, cache_modifier=".cg")
    return is_last, tile


@gluon_jit
def turned(acc, layout: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Return [BN, BM] in `layout` of a product [64 or 128, BN], of whose rows the first BM are those of x."""
    BN: gl.constexpr = TILE.BN
    THREADS: gl.constexpr = BN // 8
    halves: gl.constexpr = gl.BlockedLayout([1, 8, 2], [32 // THREADS, THREADS, 1], [TILE.KW, 1, 1], [2, 1, 0])
    LEVELS: gl.constexpr = (64 // P.BM).bit_length() - 1
    for _ in gl.static_range(LEVELS):
        pairs = acc.reshape([2, acc.shape[0] // 2, BN]).permute([1, 2, 0])
        acc, _ = gl.split(gl.convert_layout(pairs, halves))
    return gl.convert_layout(acc.permute([1, 0]), layout)


@constexpr_function
def left_layout(warps: int) -> Any:
    """Return the layout of W in registers, [1, BN, columns]."""
    product = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, warps, 1], instr_shape=[1, 16, 8])
    return gl.DotOperandLayout(0, product, 2)


@gluon_jit
def multiply_packed(acc, w, x, scales, zeros, norm, P: gl.constexpr, TILE: gl.constexpr):
    """Add a step's product to acc, W decoded in registers; one half of the columns is multiplied behind the return.

    A product reads its registers until it is waited for. There are two halves so that one is decoded while the other,
    in registers of its own, is multiplied.
    """
    BN: gl.constexpr = TILE.BN
    HALF: gl.constexpr = TILE.BK // 2
    WIDTH: gl.constexpr = stored_width(P.WEIGHT.BITS, TILE.BK)
    G: gl.constexpr = num_pieces(P.WEIGHT.GROUP, TILE.BK, P.K, P.SLICES)
    HALF_G: gl.constexpr = G // 2 if G > 1 else 1
    layout: gl.constexpr = left_layout(TILE.KW)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    words = halves(w.load(packed_layout(1, BN, WIDTH, TILE.KW)), TILE.KW)
    for half in gl.static_range(2):
        scale = half_of(scales, half, 1)
        zero = half_of(zeros, half, 1)
        a = decoded(words[half], scale, zero, half_of(norm, half, 2), HALF_G, P, layout)
        a = gl.convert_layout(a.reshape([BN, HALF]), a_layout, assert_trivial=True)
        acc = warpgroup_mma(a, x.slice(half * HALF, HALF, dim=1).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
    return acc


@gluon_jit
def wgmma_kernel(
    weight, bias, x, y, num_rows, eps, partial, operands, partials,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply W [N, K] by x [>= BM, K], with GUARD [num_rows, K]. weight: a WeightOperand of P.WEIGHT.

    The grid is (N // BN, SLICES), with KW = 4 warps, or 8 if BN is 128. BN below 64: BM is 64 at most, W has 16 bits.

    A slice is a multiple of BK columns; where the last one is shorter, it multiplies zeros in the end. LOAD and STORE
    are a pair of `epilogue.py`, `operands` what they take; P is a Problem, TILE a Tile.
    eps: None without a norm. partial: the sums of squares of x by `squares.py`, with a norm. partials: slices and
    counters of `merge_slices`, None with SLICES 1.
    """
    K: gl.constexpr = P.K
    BM: gl.constexpr = P.BM
    BN: gl.constexpr = TILE.BN
    BK: gl.constexpr = TILE.BK
    KW: gl.constexpr = TILE.KW
    NS: gl.constexpr = TILE.NS
    #: Rows of the first operand and of the second.
    LEFT: gl.constexpr = BN if BN >= 64 else 64
    RIGHT: gl.constexpr = BM if BN >= 64 else BN
    out: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[KW, 1], instr_shape=[16, RIGHT, 16])
    TK: gl.constexpr = BK // 8 if BK // 8 < 32 else 32
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // TK, TK], [KW, 1], [1, 0])
    kind: gl.constexpr = x.dtype.element_ty
    swizzle: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    COLUMNS: gl.constexpr = slice_columns(K, P.SLICES)
    STEPS: gl.constexpr = COLUMNS // BK
    IS_EVEN: gl.constexpr = P.SLICES * COLUMNS == K
    IS_PACKED: gl.constexpr = P.WEIGHT.BITS < 16
    WIDTH: gl.constexpr = stored_width(P.WEIGHT.BITS, BK)
    if IS_PACKED:
        ws = gl.allocate_shared_memory(weight.w.dtype.element_ty, [NS, 1, BN, WIDTH], packed_swizzle(WIDTH))
    else:
        ws = gl.allocate_shared_memory(kind, [NS, BN, BK], swizzle)
    xs = gl.allocate_shared_memory(kind, [NS, BM if BN >= 64 else LEFT, BK], swizzle)
    row = tile_rows(gl.program_id(0), BN, P.SPAN, gl.SliceLayout(1, copy))
    token = gl.arange(0, BM, layout=gl.SliceLayout(1, copy))
    column = gl.program_id(1) * COLUMNS + gl.arange(0, BK, layout=gl.SliceLayout(0, copy))
    wp = weight.w + row[:, None] * K + column[None, :]
    xp = x + token[:, None] * K + column[None, :]
    # Whole tiles where x has memory for them, which spares the masks.
    real = (token[:, None] < num_rows) & (column >= 0)[None, :] if P.GUARD else None
    # Columns that are left, the same for all eight that are copied at a time.
    w_left = (K - column // 8 * 8)[None, :] + (row * 0)[:, None] if not IS_EVEN else None
    if IS_PACKED:
        packed_within = packed_columns(gl.program_id(1), 1, P, TILE)
        wp = packed_pointers(weight.w, packed_within, 1, P, TILE)
        w_left = packed_left(packed_within, P, TILE)
    scales = ring_of_groups(IS_PACKED, kind, 1, P, TILE)
    zeros = ring_of_groups(P.WEIGHT.HAS_ZEROS, kind, 1, P, TILE)
    norm = ring_of_norm(kind, 1, P, TILE)
    x_left = (K - column // 8 * 8)[None, :] + (token * 0)[:, None] if not IS_EVEN else None
    for s in gl.static_range(NS - 2):
        if s < STEPS:
            fetch(ws.index(s), wp, s * WIDTH, None, w_left)
            fetch_sides(scales, zeros, norm, weight, s, gl.program_id(1), s * BK, s == 0, 1, P, TILE)
        async_copy.commit_group()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(NS - 2):
        if s < STEPS:
            fetch(xs.index(s).slice(0, BM), xp, s * BK, real, x_left)
        async_copy.commit_group()
    # Tiles that would take half of the registers are loaded when the product no longer needs them.
    AHEAD: gl.constexpr = BM * BN <= KW * 1024
    if AHEAD:
        ahead = LOAD((y, operands, num_rows, (gl.program_id(0), 0)), P, TILE)
    if eps is not None:
        sums = totals_at_once(partial, K, BM, KW)
    acc = gl.zeros([LEFT, RIGHT], gl.float32, out)
    for i in range(STEPS):
        async_copy.wait_group(NS - 3)
        fence_async_shared()
        if IS_PACKED:
            scale = of_step(scales, i % NS, P)
            zero = of_step(zeros, i % NS, P)
            of_norm = norm.index(i % NS) if P.WEIGHT.HAS_NORM else None
            acc = multiply_packed(acc, ws.index(i % NS), xs.index(i % NS), scale, zero, of_norm, P, TILE)
        else:
            if BN >= 64:
                acc = warpgroup_mma(ws.index(i % NS), xs.index(i % NS).permute([1, 0]), acc, is_async=True)
            else:
                acc = warpgroup_mma(xs.index(i % NS), ws.index(i % NS).permute([1, 0]), acc, is_async=True)
            # This tile is multiplied while the one before it is done. The one before that was done in every warp when
            # it passed the barrier after the wait: its place is free.
            acc = warpgroup_mma_wait(1, deps=[acc])
        if i + NS - 2 < STEPS:
            fetch(ws.index((i + NS - 2) % NS), wp, (i + NS - 2) * WIDTH, None, w_left)
            if IS_PACKED:
                slot = (i + NS - 2) % NS
                first = (i + NS - 2) * BK
                fetch_sides(scales, zeros, norm, weight, slot, gl.program_id(1), first, False, 1, P, TILE)
            fetch(xs.index((i + NS - 2) % NS).slice(0, BM), xp, (i + NS - 2) * BK, real, x_left)
        async_copy.commit_group()
    acc = unshifted(warpgroup_mma_wait(0, deps=[acc]), kind, P)
    whole: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0)
    first: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0 and P.SLICES == 1)
    tile = gl.convert_layout(acc, first) if BN >= 64 else turned(acc, first, P, TILE)
    is_last = True
    if P.SLICES > 1:
        is_last, tile = merge_slices(tile, partials, P, TILE)
    if is_last:
        y_tile = gl.convert_layout(tile, whole)
        if not AHEAD:
            ahead = LOAD((y, operands, num_rows, (gl.program_id(0), 0)), P, TILE)
        if eps is not None:
            y_tile = normalised(y_tile, sums, (eps, bias), kind, P, TILE)
        STORE(y_tile, ahead, (y, operands, num_rows, (gl.program_id(0), 0)), P, TILE)
