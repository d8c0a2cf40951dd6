"""Gluon kernel for y = W x with 16 to 128 rows of x, W the 64- or 128-row operand of wgmma; `fused_linear.py` has formula and
launchers.

One program takes BN rows of W over one of SPLITS shares of K. As in `gemv.py`, NS tiles of W are in flight before the
programmatic wait and x follows behind it in a ring of its own. With several shares each stores its sums in float32, and the
last to arrive adds them all in the order of their numbers: the result is the same every time.
"""

from __future__ import annotations

from photon_grpc.kernels.gluon import (
    async_copy,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from photon_grpc.kernels.linear.epilogue import finish, load_ahead, tile_layout, tile_rows


@gluon_jit
def merge_shares(
    tile, squares, partial, counters,
    SPLITS: gl.constexpr, NORM: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, whole: gl.constexpr,
):  # fmt: skip
    """(is last, sums [BN, BM], squares [BM]): stores this share, and reads all of them where it arrived last.

    partial float32 [tiles, SPLITS, BN · BM + BM]; counters int32 [tiles], zero before and after.
    """
    SIZE: gl.constexpr = BN * BM + BM
    program = gl.program_id(0)
    row = gl.arange(0, BN, layout=gl.SliceLayout(1, whole))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, whole))
    within = token[None, :] * BN + row[:, None]
    shares = partial + program * (SPLITS * SIZE)
    mine = shares + gl.program_id(1) * SIZE
    gl.store(mine + within, tile)
    if NORM:
        gl.store(mine + BN * BM + token, squares)
    gl.thread_barrier()
    arrived = gl.atomic_add(counters + program, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    if is_last:
        gl.store(counters + program, 0)
        tile = gl.load(shares + within, cache_modifier=".cg")
        for share in gl.static_range(1, SPLITS):
            tile += gl.load(shares + share * SIZE + within, cache_modifier=".cg")
        if NORM:
            squares = gl.load(shares + BN * BM + token, cache_modifier=".cg")
            for share in gl.static_range(1, SPLITS):
                squares += gl.load(shares + share * SIZE + BN * BM + token, cache_modifier=".cg")
    return is_last, tile, squares


@gluon_jit
def wgmma_kernel(
    w, bias, x, y, pages, cos, sin, positions, slot_mapping, num_rows, eps, block_stride,
    slots, context_len, temperature, seed, output_index, num_prompt, tops, ids,
    partial, counters,
    EPILOGUE: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SPAN: gl.constexpr, Q_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, NORM: gl.constexpr, PDL: gl.constexpr,
    GUARD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, KW: gl.constexpr, NS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """W [N, K], x [>= BM, K], with GUARD [num_rows, K]; grid (N // BN, SPLITS), KW = 4 warps, or 8 with BN 128. K is a multiple of SPLITS · BK."""
    out: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[KW, 1], instr_shape=[16, BM, 16])
    TK: gl.constexpr = BK // 8 if BK // 8 < 32 else 32
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // TK, TK], [KW, 1], [1, 0])
    kind: gl.constexpr = w.dtype.element_ty
    swizzle: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    STEPS: gl.constexpr = K // (SPLITS * BK)
    ws = gl.allocate_shared_memory(kind, [NS, BN, BK], swizzle)
    xs = gl.allocate_shared_memory(kind, [NS, BM, BK], swizzle)
    row = tile_rows(gl.program_id(0), BN, SPAN, gl.SliceLayout(1, copy))
    token = gl.arange(0, BM, layout=gl.SliceLayout(1, copy))
    column = gl.program_id(1) * (STEPS * BK) + gl.arange(0, BK, layout=gl.SliceLayout(0, copy))
    wp = w + row[:, None] * K + column[None, :]
    xp = x + token[:, None] * K + column[None, :]
    # Whole tiles where x has memory for them, which spares the masks.
    real = (token[:, None] < num_rows) & (column >= 0)[None, :] if GUARD else None
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
    # Tiles that would take half of the registers are asked for when the product has left them.
    AHEAD: gl.constexpr = BM * BN <= KW * 1024
    if AHEAD:
        first, second = load_ahead(y, cos, sin, positions, num_rows, EPILOGUE, N, SPAN, BM, BN, KW)
    acc = gl.zeros([BN, BM], gl.float32, out)
    squares = gl.zeros([BM, BK], gl.float32, copy)
    for i in range(STEPS):
        async_copy.wait_group(NS - 2)
        fence_async_shared()
        acc = warpgroup_mma(ws.index(i % NS), xs.index(i % NS).permute([1, 0]), acc, is_async=True)
        # Every warp has multiplied the tile before this one (the barrier behind the wait says so): its place is free.
        if i + NS - 1 < STEPS:
            async_copy.async_copy_global_to_shared(ws.index((i + NS - 1) % NS), wp + (i + NS - 1) * BK)
            async_copy.async_copy_global_to_shared(xs.index((i + NS - 1) % NS), xp + (i + NS - 1) * BK, mask=real)
        async_copy.commit_group()
        if NORM:
            wide = xs.index(i % NS).load(copy).to(gl.float32)
            squares += wide * wide
        acc = warpgroup_mma_wait(0, deps=[acc])
    whole: gl.constexpr = tile_layout(BN, BM, KW, SPAN > 0)
    sums = gl.convert_layout(acc, whole)
    total = gl.convert_layout(gl.sum(squares, 1), gl.SliceLayout(0, whole))
    is_last = True
    if SPLITS > 1:
        is_last, sums, total = merge_shares(sums, total, partial, counters, SPLITS, NORM, BM, BN, whole)
    if is_last:
        if NORM:
            sums = sums * gl.rsqrt(total / K + eps)[None, :]
        if not AHEAD:
            first, second = load_ahead(y, cos, sin, positions, num_rows, EPILOGUE, N, SPAN, BM, BN, KW)
        finish(
            sums, first, second, bias, y, pages, slot_mapping, num_rows, block_stride,
            slots, context_len, temperature, seed, output_index, num_prompt, tops, ids,
            EPILOGUE, N, SPAN, Q_HEADS, KV_HEADS, BLOCK_SIZE, BM, BN, KW,
        )  # fmt: skip
