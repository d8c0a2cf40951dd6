"""Gluon kernel for y = W x with 16 to 128 rows of x, W the 64- or 128-row operand of wgmma.

`fused_linear.py` has the formula and the launchers.

One program takes BN rows of W over one of SPLITS splits of K. As in `gemv.py`, NS tiles of W are in flight before the
programmatic wait and x follows after it in a separate pipeline. Each of several splits stores its sums in float32, and
the last to finish adds them all in the order of their numbers: the result is the same every time.
"""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import (
    async_copy,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from photon_grpc.kernels.linear.epilogue import add_bias, tile_layout, tile_rows


@gluon_jit
def merge_splits(tile, squares, partials, NORM: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Store this split; if it is the last, read all: returns (is last, sums [BN, BM], squares [BM]).

    Both are in a `tile_layout` without pairs, whose neighbours in a thread are neighbours in memory. partial float32
    [tiles, SPLITS, BN · BM + BM]; counters int32 [tiles], zero before and after.
    """
    partial, counters = partials
    BM: gl.constexpr = P.BM
    BN: gl.constexpr = TILE.BN
    SPLITS: gl.constexpr = TILE.SPLITS
    SIZE: gl.constexpr = BN * BM + BM
    apart: gl.constexpr = tile_layout(BN, BM, TILE.KW, False)
    program = gl.program_id(0)
    row = gl.arange(0, BN, layout=gl.SliceLayout(1, apart))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, apart))
    within = token[None, :] * BN + row[:, None]
    of_tile = partial + program * (SPLITS * SIZE)
    own = of_tile + gl.program_id(1) * SIZE
    gl.store(own + within, tile)
    if NORM:
        gl.store(own + BN * BM + token, squares)
    gl.thread_barrier()
    arrived = gl.atomic_add(counters + program, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    if is_last:
        gl.store(counters + program, 0)
        tile = gl.load(of_tile + within, cache_modifier=".cg")
        for split in gl.static_range(1, SPLITS):
            tile += gl.load(of_tile + split * SIZE + within, cache_modifier=".cg")
        if NORM:
            squares = gl.load(of_tile + BN * BM + token, cache_modifier=".cg")
            for split in gl.static_range(1, SPLITS):
                squares += gl.load(of_tile + split * SIZE + BN * BM + token, cache_modifier=".cg")
    return is_last, tile, squares


@gluon_jit
def wgmma_kernel(
    w, bias, x, y, num_rows, eps, operands, partials,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply W [N, K] by x [>= BM, K], with GUARD [num_rows, K].

    The grid is (N // BN, SPLITS), with KW = 4 warps, or 8 if BN is 128.

    K is a multiple of SPLITS · BK. LOAD and STORE are a pair of `epilogue.py`, `operands` what they take; P is a
    Problem, TILE a Tile.
    eps: None without a norm. partials: partial and counters of `merge_splits`, None with SPLITS 1.
    """
    K: gl.constexpr = P.K
    BM: gl.constexpr = P.BM
    BN: gl.constexpr = TILE.BN
    BK: gl.constexpr = TILE.BK
    KW: gl.constexpr = TILE.KW
    NS: gl.constexpr = TILE.NS
    out: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[KW, 1], instr_shape=[16, BM, 16])
    TK: gl.constexpr = BK // 8 if BK // 8 < 32 else 32
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // TK, TK], [KW, 1], [1, 0])
    kind: gl.constexpr = w.dtype.element_ty
    swizzle: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    STEPS: gl.constexpr = K // (TILE.SPLITS * BK)
    ws = gl.allocate_shared_memory(kind, [NS, BN, BK], swizzle)
    xs = gl.allocate_shared_memory(kind, [NS, BM, BK], swizzle)
    row = tile_rows(gl.program_id(0), BN, P.SPAN, gl.SliceLayout(1, copy))
    token = gl.arange(0, BM, layout=gl.SliceLayout(1, copy))
    column = gl.program_id(1) * (STEPS * BK) + gl.arange(0, BK, layout=gl.SliceLayout(0, copy))
    wp = w + row[:, None] * K + column[None, :]
    xp = x + token[:, None] * K + column[None, :]
    # Whole tiles where x has memory for them, which spares the masks.
    real = (token[:, None] < num_rows) & (column >= 0)[None, :] if P.GUARD else None
    for s in gl.static_range(NS - 1):
        if s < STEPS:
            async_copy.async_copy_global_to_shared(ws.index(s), wp + s * BK)
        async_copy.commit_group()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(NS - 1):
        if s < STEPS:
            async_copy.async_copy_global_to_shared(xs.index(s), xp + s * BK, mask=real)
        async_copy.commit_group()
    # Tiles that would take half of the registers are loaded when the product no longer needs them.
    AHEAD: gl.constexpr = BM * BN <= KW * 1024
    if AHEAD:
        ahead = LOAD((y, operands, num_rows), P, TILE)
    acc = gl.zeros([BN, BM], gl.float32, out)
    squares = gl.zeros([BM, BK], gl.float32, copy)
    for i in range(STEPS):
        async_copy.wait_group(NS - 2)
        fence_async_shared()
        acc = warpgroup_mma(ws.index(i % NS), xs.index(i % NS).permute([1, 0]), acc, is_async=True)
        # Every warp has multiplied the tile before this one, by the barrier after the wait: its place is free.
        if i + NS - 1 < STEPS:
            async_copy.async_copy_global_to_shared(ws.index((i + NS - 1) % NS), wp + (i + NS - 1) * BK)
            async_copy.async_copy_global_to_shared(xs.index((i + NS - 1) % NS), xp + (i + NS - 1) * BK, mask=real)
        async_copy.commit_group()
        if eps is not None:
            x_float = xs.index(i % NS).load(copy).to(gl.float32)
            squares += x_float * x_float
        acc = warpgroup_mma_wait(0, deps=[acc])
    whole: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0)
    first: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0 and TILE.SPLITS == 1)
    sums = gl.convert_layout(acc, first)
    total = gl.convert_layout(gl.sum(squares, 1), gl.SliceLayout(0, first))
    is_last = True
    if TILE.SPLITS > 1:
        is_last, sums, total = merge_splits(sums, total, partials, eps is not None, P, TILE)
    if is_last:
        y_tile = gl.convert_layout(sums, whole)
        if eps is not None:
            scale = gl.rsqrt(gl.convert_layout(total, gl.SliceLayout(0, whole)) / K + eps)
            y_tile = y_tile * scale[None, :]
        if not AHEAD:
            ahead = LOAD((y, operands, num_rows), P, TILE)
        STORE(add_bias(y_tile, bias, P, TILE), ahead, (y, operands, num_rows), P, TILE)
