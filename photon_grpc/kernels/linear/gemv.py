"""Gluon kernel for y = W x with at most 16 rows of x, at the speed of memory.

`fused_linear.py` has the formula and the launchers.

One program takes BN rows of W over all of K, each of its KW warps a slice of K: the layout of the product has rank 3
with the warps along the batch axis, and the warps' sums are added last, in a fixed order. Nothing is split among
programs, so there are no atomics and the result is the same every time. NS tiles of W are in flight before the
programmatic wait; x follows after it through a separate pipeline, in the same groups of copies, so that one wait
serves both.
"""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import async_copy, gdc_launch_dependents, gdc_wait, gl, gluon_jit, mma_v2
from photon_grpc.kernels.linear.epilogue import add_bias, tile_layout, tile_rows


@gluon_jit
def _fetch(to, source, real, of_last, is_before_last):
    """Begin the copy of a tile: zeros if `real` is false, in the last step if `of_last` is; None: copy all."""
    if of_last is None:
        async_copy.async_copy_global_to_shared(to, source, mask=real)
    elif real is None:
        async_copy.async_copy_global_to_shared(to, source, mask=of_last | is_before_last)
    else:
        async_copy.async_copy_global_to_shared(to, source, mask=(of_last | is_before_last) & real)


@gluon_jit
def gemv_kernel(
    w, bias, x, y, num_rows, eps, operands,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply W [N, K] by x [>= BM, K], with GUARD [num_rows, K].

    The grid is N // BN, with KW warps and BM 8 to 32. K is a multiple of BK: in the last step, a warp that has no
    columns left multiplies zeros.

    LOAD and STORE are a pair of `epilogue.py`, `operands` what they take; P is a Problem, TILE a Tile. eps: None
    without a norm.
    """
    K: gl.constexpr = P.K
    BM: gl.constexpr = P.BM
    BN: gl.constexpr = TILE.BN
    BK: gl.constexpr = TILE.BK
    KW: gl.constexpr = TILE.KW
    NS: gl.constexpr = TILE.NS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[KW, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    stacked: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0, KW)
    whole: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0)
    TK: gl.constexpr = BK // 8 if BK // 8 < 32 else 32
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // TK, TK], [KW, 1, 1], [2, 1, 0])
    swizzle: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    STEPS: gl.constexpr = (K + KW * BK - 1) // (KW * BK)
    #: Warps that have columns in the last step.
    LAST: gl.constexpr = K // BK - (STEPS - 1) * KW
    kind: gl.constexpr = w.dtype.element_ty
    ws = gl.allocate_shared_memory(kind, [NS, KW, BN, BK], swizzle)
    xs = gl.allocate_shared_memory(kind, [NS, KW, BM, BK], swizzle)
    warp = gl.arange(0, KW, layout=gl.SliceLayout(1, gl.SliceLayout(2, copy)))
    row = tile_rows(gl.program_id(0), BN, P.SPAN, gl.SliceLayout(0, gl.SliceLayout(2, copy)))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy)))
    column = gl.arange(0, BK, layout=gl.SliceLayout(0, gl.SliceLayout(1, copy)))
    within = (warp * BK)[:, None, None] + column[None, None, :]
    wp = w + row[None, :, None] * K + within
    xp = x + token[None, :, None] * K + within
    # Whole tiles where x has memory for them, which spares the masks.
    real = (token[None, :, None] < num_rows) & (within >= 0) if P.GUARD else None
    w_last = (warp < LAST)[:, None, None] & (within >= 0) & (row >= 0)[None, :, None] if LAST < KW else None
    x_last = (warp < LAST)[:, None, None] & (within >= 0) & (token >= 0)[None, :, None] if LAST < KW else None
    for s in gl.static_range(NS):
        if s < STEPS:
            _fetch(ws.index(s), wp + s * KW * BK, None, w_last, s < STEPS - 1)
        async_copy.commit_group()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(NS):
        if s < STEPS:
            _fetch(xs.index(s), xp + s * KW * BK, real, x_last, s < STEPS - 1)
        async_copy.commit_group()
    ahead = LOAD((y, operands, num_rows), P, TILE)
    acc = gl.zeros([KW, BN, BM], gl.float32, mma)
    squares = gl.zeros([KW, BM], gl.float32, gl.SliceLayout(1, right))
    for i in range(STEPS):
        async_copy.wait_group(NS - 1)
        xt = xs.index(i % NS).permute([0, 2, 1]).load(right)
        acc = mma_v2(ws.index(i % NS).load(left), xt, acc)
        if eps is not None:
            x_float = xt.to(gl.float32)
            squares += gl.sum(x_float * x_float, 1)
        if i + NS < STEPS:
            _fetch(ws.index(i % NS), wp + (i + NS) * KW * BK, None, w_last, i + NS < STEPS - 1)
            _fetch(xs.index(i % NS), xp + (i + NS) * KW * BK, real, x_last, i + NS < STEPS - 1)
        async_copy.commit_group()
    total = gl.convert_layout(gl.sum(gl.convert_layout(acc, stacked), 0), whole)
    if eps is not None:
        scale = gl.rsqrt(gl.sum(squares, 0) / K + eps)
        total = total * gl.convert_layout(scale, gl.SliceLayout(0, whole))[None, :]
    STORE(add_bias(total, bias, P, TILE), ahead, (y, operands, num_rows), P, TILE)
