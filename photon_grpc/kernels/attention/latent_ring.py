"""Gluon kernel of attention over latents for Hopper: the sums of `latent_lanes.py` by wgmma, for every length of a row.

A tile of 64 keys is the operand with 64 rows in both products, and the queries are the narrow side: HEADS of one token,
or of a few:

    Sᵀ [64, N] = C qᵀ,   Oᵀ [R, N] += C[:, :R]ᵀ Pᵀ       C [64, R + P], read once for both

Tiles arrive through a ring of shared memory. The order of sums is that of the keys alone: prompts, chunks and single
tokens have the same bits.
"""

from __future__ import annotations

from typing import Any

from photon_grpc.kernels.attention.find_tile import find_tile
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

#: Warps of a program.
WARPS = 8


@constexpr_function
def rows_layout(width: int, num_warps: int) -> Any:
    """Return the layout that copies rows of `width` numbers of 16 bits, 16 bytes a thread."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@constexpr_function
def swizzled() -> Any:
    """Return the layout of rows in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon_jit
def fetch_rows(to, source, offset, there, FIRST: gl.constexpr, WARPS: gl.constexpr):
    """Begin the copy of rows, row r from source + offset[r] + FIRST on; zeros for those that are not there."""
    WIDTH: gl.constexpr = to.shape[1]
    layout: gl.constexpr = rows_layout(WIDTH, WARPS)
    offset = gl.convert_layout(offset, gl.SliceLayout(1, layout))
    there = gl.convert_layout(there, gl.SliceLayout(1, layout))
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    pointers = source + offset[:, None] + column[None, :]
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [16, 16]), [1, 8])
    async_copy.async_copy_global_to_shared(to, pointers, mask=there[:, None] & (column >= 0)[None, :])


@gluon_jit
def fetch_keys(cs, rs, pages, table, first, stop, block_stride, C: gl.constexpr, WARPS: gl.constexpr):
    """Begin the copy of the latents of the keys from `first` on; those from `stop` on are zeros."""
    layout: gl.constexpr = gl.SliceLayout(1, rows_layout(C.RANK, WARPS))
    key = first + gl.arange(0, cs.shape[0], layout=layout)
    there = key < stop
    block = gl.load(table + key // C.BLOCK_SIZE, mask=there, other=0).to(gl.int64)
    at = block * block_stride + key % C.BLOCK_SIZE * (C.RANK + C.ROTATED)
    fetch_rows(cs, pages, at, there, 0, WARPS)
    fetch_rows(rs, pages, at, there, C.RANK, WARPS)


@gluon_jit
def fold(kept, lane, sums: gl.constexpr):
    """Return the state with a later lane in it, as `latent_lanes.merged` does."""
    most, total, acc = kept
    lane_most, lane_total, lane_acc = lane
    largest = gl.maximum(most, lane_most)
    before, now = gl.exp2(most - largest), gl.exp2(lane_most - largest)
    total = gl.fma(lane_total, now, total * before)
    before, now = gl.convert_layout(before, sums)[None, :], gl.convert_layout(now, sums)[None, :]
    zeros = acc * 0.0
    return largest, total, gl.fma(lane_acc, now + zeros, acc * before)


@gluon_jit
def empty(N: gl.constexpr, RANK: gl.constexpr, scores: gl.constexpr, sums: gl.constexpr):
    """Return the state before the first key: largest scores [N], sums of powers [N], of values [RANK, N]."""
    column: gl.constexpr = gl.SliceLayout(0, scores)
    most = gl.full([N], -float("inf"), gl.float32, column)
    return most, gl.full([N], 0.0, gl.float32, column), gl.zeros([RANK, N], gl.float32, sums)


@gluon_jit
def latent_ring_kernel(
    q, pages, out, parts, query_start, context_len, tables, num_rows, scale, block_stride, table_stride,
    C: gl.constexpr, IS_ONE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend as `latent_kernel` does; C.COLUMNS is the rank. IS_ONE: every row has one query."""
    N: gl.constexpr = C.TOKENS * C.HEADS
    RANK: gl.constexpr = C.RANK
    ROTATED: gl.constexpr = C.ROTATED
    NS: gl.constexpr = 2
    KEYS: gl.constexpr = 64
    WARPS: gl.constexpr = 8
    HALF: gl.constexpr = N // 2
    kind: gl.constexpr = q.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, HALF, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, N, 16])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if IS_ONE:
        row = gl.program_id(0)
        first_query, count, first = row, 1, 0
    else:
        row, first_query, count, first = find_tile(query_start, num_rows, gl.program_id(0), C.TOKENS)
    number = gl.program_id(2)
    of_row = gl.load(context_len + row) - count - first_query
    token = first_query + first
    stop = of_row + gl.minimum(token + C.TOKENS, first_query + count)
    begin = 0
    if parts is not None:
        if (first < count) & (number == 0):
            gl.store(parts[3] + token, (stop + C.LANE - 1) // C.LANE)
        begin = number * C.LANE
        stop = gl.minimum(stop, begin + C.LANE)
    steps = (stop - begin + KEYS - 1) // KEYS
    if (first < count) & (steps > 0):
        cs = gl.allocate_shared_memory(kind, [NS, KEYS, RANK], swizzled())
        rs = gl.allocate_shared_memory(kind, [NS, KEYS, ROTATED], swizzled())
        qs = gl.allocate_shared_memory(kind, [N, RANK], swizzled())
        turned = gl.allocate_shared_memory(kind, [N, ROTATED], swizzled())
        ps = gl.allocate_shared_memory(kind, [N, KEYS], swizzled())
        table = tables + row.to(gl.int64) * table_stride
        of_q: gl.constexpr = gl.SliceLayout(1, rows_layout(RANK, WARPS))
        member = gl.arange(0, N, layout=of_q)
        head = gl.program_id(1) * C.HEADS + member % C.HEADS
        real = (head < C.NUM_HEADS) & (token + member // C.HEADS < first_query + count)
        at = ((token + member // C.HEADS).to(gl.int64) * C.NUM_HEADS + head) * (RANK + ROTATED)
        fetch_rows(qs, q, at, real, 0, WARPS)
        fetch_rows(turned, q, at, real, RANK, WARPS)
        fetch_keys(cs.index(0), rs.index(0), pages, table, begin, stop, block_stride, C, WARPS)
        async_copy.commit_group()
        column: gl.constexpr = gl.SliceLayout(0, scores)
        last = of_row + token + gl.arange(0, N, layout=column) // C.HEADS
        key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, scores))
        of_sums: gl.constexpr = gl.SliceLayout(0, sums)
        most, total, acc = empty(N, RANK, scores, sums)
        kept = empty(N, RANK, scores, sums)
        kept_most, kept_total, kept_acc = kept
        for i in range(steps):
            slot = i % NS
            async_copy.wait_group(0)
            fence_async_shared()
            # All warps are done with the tile before: its place is free.
            gl.thread_barrier()
            if i + 1 < steps:
                after = begin + (i + 1) * KEYS
                fetch_keys(cs.index(1 - slot), rs.index(1 - slot), pages, table, after, stop, block_stride, C, WARPS)
            async_copy.commit_group()
            s = gl.zeros([KEYS, N], gl.float32, scores)
            s = warpgroup_mma(cs.index(slot), qs.permute([1, 0]), s, is_async=True)
            s = warpgroup_mma(rs.index(slot), turned.permute([1, 0]), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            seen = (begin + i * KEYS + key)[:, None] <= last[None, :]
            s = gl.where(seen, s * scale, -float("inf"))
            largest = gl.maximum(most, gl.max(s, 0))
            base = gl.where(largest == -float("inf"), 0.0, largest)
            shrink = gl.exp2(most - base)
            p = gl.exp2(s - base[None, :])
            total = gl.fma(total, shrink, gl.sum(p, 0))
            most = largest
            ps.permute([1, 0]).store(p.to(kind))
            fence_async_shared()
            gl.thread_barrier()
            acc = acc * gl.convert_layout(shrink, of_sums)[None, :]
            acc = warpgroup_mma(cs.index(slot).permute([1, 0]), ps.permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if parts is None:  # noqa: SIM102
                if ((i + 1) % (C.LANE // KEYS) == 0) & (i + 1 < steps):
                    kept_most, kept_total, kept_acc = fold(
                        (kept_most, kept_total, kept_acc), (most, total, acc), of_sums
                    )  # fmt: skip
                    most, total, acc = empty(N, RANK, scores, sums)
        plain = gl.arange(0, RANK, layout=gl.SliceLayout(1, sums))
        member = gl.arange(0, N, layout=of_sums)
        head = gl.program_id(1) * C.HEADS + member % C.HEADS
        real = (head < C.NUM_HEADS) & (token + member // C.HEADS < first_query + count)
        pair = (token + member // C.HEADS).to(gl.int64) * C.NUM_HEADS + head
        if parts is None:
            most, total, acc = fold((kept_most, kept_total, kept_acc), (most, total, acc), of_sums)
            answer = (acc / gl.convert_layout(total, of_sums)[None, :]).to(out.dtype.element_ty)
            to = out + pair[None, :] * RANK + plain[:, None]
            gl.store(to, answer, mask=real[None, :] & (plain >= 0)[:, None])
        else:
            place = pair * gl.num_programs(2) + number
            gl.store(parts[0] + place, gl.convert_layout(most, of_sums), mask=real)
            gl.store(parts[1] + place, gl.convert_layout(total, of_sums), mask=real)
            to = parts[2] + place[None, :] * RANK + plain[:, None]
            gl.store(to, acc, mask=real[None, :] & (plain >= 0)[:, None])
