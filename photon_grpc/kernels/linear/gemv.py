"""Gluon kernel for y = W x with at most 32 rows of x, at the speed of memory.

`fused_linear.py` has the formula and the launchers.

One program takes BN rows of W over all of K. K is cut as `cut.py` says; each slice has KW / SLICES warps, which share
the rows of W: the layout of the product has rank 3 with the slices along the batch axis, and the slices' sums are added
last, in the order of their numbers. Nothing is split among programs, so there are no atomics. NS tiles of W are in
flight before the programmatic wait; x follows after it through a separate pipeline, in the same groups of copies, so
that one wait serves both.
"""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import (
    async_copy,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mma_v2,
)
from photon_grpc.kernels.lang.squares import load_partials, padded_groups, totals, totals_at_once
from photon_grpc.kernels.linear.cut import slice_columns
from photon_grpc.kernels.linear.decode import decoded, packed_layout, packed_swizzle, unshifted
from photon_grpc.kernels.linear.epilogue import normalised, tile_layout, tile_rows
from photon_grpc.kernels.linear.sides import (
    fetch_sides,
    of_step,
    packed_columns,
    packed_left,
    packed_pointers,
    ring_of_groups,
    ring_of_norm,
)
from photon_grpc.kernels.linear.tiles import num_parts, num_pieces, operand_registers, stored_width


@gluon_jit
def gemv_kernel(
    weight, bias, x, y, num_rows, eps, partial, operands,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply W [N, K] by x [>= BM, K], with GUARD [num_rows, K]. weight: a WeightOperand of P.WEIGHT.

    The grid is N // BN, with KW warps and BM 8 to 32. A slice is a multiple of BK columns; where the last one is
    shorter, it multiplies zeros in the end.

    LOAD and STORE are a pair of `epilogue.py`, `operands` what they take; P is a Problem, TILE a Tile. eps: None
    without a norm. partial: the sums of squares of x by `squares.py`, with a norm.
    """
    K: gl.constexpr = P.K
    BM: gl.constexpr = P.BM
    S: gl.constexpr = P.SLICES
    BN: gl.constexpr = TILE.BN
    BK: gl.constexpr = TILE.BK
    KW: gl.constexpr = TILE.KW
    NS: gl.constexpr = TILE.NS
    WN: gl.constexpr = KW // S
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, WN, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    stacked: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0, S)
    whole: gl.constexpr = tile_layout(BN, BM, KW, P.SPAN > 0)
    TK: gl.constexpr = BK // 8 if BK // 8 < 32 else 32
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // TK, TK], [S, WN, 1], [2, 1, 0])
    swizzle: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    COLUMNS: gl.constexpr = slice_columns(K, S)
    STEPS: gl.constexpr = COLUMNS // BK
    #: Steps that every slice has in full.
    WHOLE: gl.constexpr = (K - (S - 1) * COLUMNS) // BK
    kind: gl.constexpr = x.dtype.element_ty
    IS_PACKED: gl.constexpr = P.WEIGHT.BITS < 16
    WIDTH: gl.constexpr = stored_width(P.WEIGHT.BITS, BK)
    G: gl.constexpr = num_pieces(P.WEIGHT.GROUP, BK, K, S)
    packed: gl.constexpr = packed_layout(S, BN, WIDTH, KW)
    w_swizzle: gl.constexpr = packed_swizzle(WIDTH) if IS_PACKED else swizzle
    ws = gl.allocate_shared_memory(weight.w.dtype.element_ty, [NS, S, BN, WIDTH], w_swizzle)
    xs = gl.allocate_shared_memory(kind, [NS, S, BM, BK], swizzle)
    part = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, copy)))
    row = tile_rows(gl.program_id(0), BN, P.SPAN, gl.SliceLayout(0, gl.SliceLayout(2, copy)))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy)))
    column = gl.arange(0, BK, layout=gl.SliceLayout(0, gl.SliceLayout(1, copy)))
    within = (part * COLUMNS)[:, None, None] + column[None, None, :]
    wp = weight.w + row[None, :, None] * K + within
    xp = x + token[None, :, None] * K + within
    # Whole tiles where x has memory for them, which spares the masks.
    real = (token[None, :, None] < num_rows) & (within >= 0) if P.GUARD else None
    # Columns that are left, the same for all eight that are copied at a time.
    w_left = K - within // 8 * 8 + (row * 0)[None, :, None] if WHOLE < STEPS else None
    if IS_PACKED:
        packed_within = packed_columns(0, S, P, TILE)
        wp = packed_pointers(weight.w, packed_within, S, P, TILE)
        w_left = packed_left(packed_within, P, TILE)
    scales = ring_of_groups(IS_PACKED, kind, S, P, TILE)
    zeros = ring_of_groups(P.WEIGHT.HAS_ZEROS, kind, S, P, TILE)
    norm = ring_of_norm(kind, S, P, TILE)
    x_left = K - within // 8 * 8 + (token * 0)[None, :, None] if WHOLE < STEPS else None
    for s in gl.static_range(NS):
        if s < STEPS:
            fetch(ws.index(s), wp, s * WIDTH, None, w_left)
            fetch_sides(scales, zeros, norm, weight, s, 0, s * BK, s == 0, S, P, TILE)
        async_copy.commit_group()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(NS):
        if s < STEPS:
            fetch(xs.index(s), xp, s * BK, real, x_left)
        async_copy.commit_group()
    ahead = LOAD((y, operands, num_rows, (gl.program_id(0), 0)), P, TILE)
    # Few sums are asked for here and added when the product is done; many are added while W arrives.
    FEW: gl.constexpr = BM * padded_groups(K) <= 32 * KW * 32
    if eps is not None:
        sums = load_partials(partial, K, BM, KW) if FEW else totals_at_once(partial, K, BM, KW)
    acc = gl.zeros([S, BN, BM], gl.float32, mma)
    if IS_PACKED:
        for i in range(STEPS):
            async_copy.wait_group(NS - 1)
            xt = xs.index(i % NS).permute([0, 2, 1]).load(right)
            words = ws.index(i % NS).load(packed)
            of_norm = norm.index(i % NS) if P.WEIGHT.HAS_NORM else None
            wt = decoded(words, of_step(scales, i % NS, P), of_step(zeros, i % NS, P), of_norm, G, P, left)
            acc = mma_v2(wt, xt, acc)
            if i + NS < STEPS:
                fetch(ws.index(i % NS), wp, (i + NS) * WIDTH, None, w_left)
                fetch_sides(scales, zeros, norm, weight, i % NS, 0, (i + NS) * BK, False, S, P, TILE)
                fetch(xs.index(i % NS), xp, (i + NS) * BK, real, x_left)
            async_copy.commit_group()
    else:
        # A product of 16 columns waits for the one before it: the next part of a step is loaded, and another step asked
        # for, while a part is multiplied. There is no branch, past which instructions would not be moved.
        PARTS: gl.constexpr = num_parts(BK, operand_registers(BN, BK, BM, WN), P.SPAN > 0)
        async_copy.wait_group(NS - 1)
        wt, xt = part_of_step(ws.index(0), xs.index(0), 0, PARTS, left, right)
        for i in range(STEPS):
            for number in gl.static_range(1, PARTS):
                w_next, x_next = part_of_step(ws.index(i % NS), xs.index(i % NS), number, PARTS, left, right)
                if number == PARTS - 1:
                    is_step = i + NS < STEPS
                    of_w = gl.full([S, BN, BK], is_step, gl.int1, copy)
                    of_x = gl.full([S, BM, BK], is_step, gl.int1, copy)
                    fetch(ws.index(i % NS), wp, (i + NS) * BK, of_w, w_left)
                    fetch(xs.index(i % NS), xp, (i + NS) * BK, of_x & real if P.GUARD else of_x, x_left)
                    async_copy.commit_group()
                acc = mma_v2(wt, xt, acc)
                wt = w_next
                xt = x_next
            async_copy.wait_group(NS - 1)
            w_next, x_next = part_of_step(ws.index((i + 1) % NS), xs.index((i + 1) % NS), 0, PARTS, left, right)
            acc = mma_v2(wt, xt, acc)
            wt = w_next
            xt = x_next
        # Copies that are masked write zeros, and the ring's memory has another use behind this.
        async_copy.wait_group(0)
    total = gl.convert_layout(gl.sum(gl.convert_layout(unshifted(acc, kind, P), stacked), 0), whole)
    if eps is not None:
        total = normalised(total, totals(sums) if FEW else sums, (eps, bias), kind, P, TILE)
    STORE(total, ahead, (y, operands, num_rows, (gl.program_id(0), 0)), P, TILE)


@gluon_jit
def part_of_step(w, x, number: gl.constexpr, PARTS: gl.constexpr, left: gl.constexpr, right: gl.constexpr):
    """Return one of PARTS parts of a step's columns of W [S, BN, BK] and of x, as operands of a product."""
    COLUMNS: gl.constexpr = w.shape[2] // PARTS
    x_part = x.slice(number * COLUMNS, COLUMNS, dim=2).permute([0, 2, 1])
    return w.slice(number * COLUMNS, COLUMNS, dim=2).load(left), x_part.load(right)


@gluon_jit
def fetch(to, source, first, real, left):
    """Begin the copy of columns from `first` on: zeros where `real` is false or `left` columns end; None: copy all."""
    if left is None:
        async_copy.async_copy_global_to_shared(to, source + first, mask=real)
    elif real is None:
        async_copy.async_copy_global_to_shared(to, source + first, mask=left > first)
    else:
        async_copy.async_copy_global_to_shared(to, source + first, mask=(left > first) & real)
