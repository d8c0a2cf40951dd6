"""Gluon kernel of attention over latents for Hopper: the sums of `latent_lanes.py` by wgmma, for every length of a row.

A tile of 64 keys is the operand with 64 rows in both products, and the queries are the narrow side: HEADS of one token,
or of a few:

    Sᵀ [64, N] = C qᵀ,   Oᵀ [R, N] += C[:, :R]ᵀ Pᵀ       C [64, R + P], read once for both

Tiles arrive through a ring of shared memory, fetched by the bulk copy engine. The order of sums is that of the keys
alone: prompts, chunks and single tokens have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.attention.find_tile import find_tile
from photon_grpc.kernels.lang.gluon import (
    TensorDescriptor,
    async_copy,
    constexpr_function,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

#: Keys of a tile.
KEYS = 64


@constexpr_function
def rows_layout(width: int, num_warps: int) -> Any:
    """Return the layout that copies rows of `width` numbers of 16 bits, 16 bytes a thread."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@constexpr_function
def box_rows(block_size: int, keys: int) -> int:
    """Return the rows that are fetched at once: those of a tile that one block has."""
    return min(block_size, keys)


def descriptors(pages: torch.Tensor, rank: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the bulk copy engine's views of all pages, rows [num_blocks · layers · block_size, R + P]: plain, rotated.

    They copy all columns of a tile at once, or 64 of those that one of several blocks has.
    """
    rows, box = pages.view(-1, pages.shape[-1]), box_rows(pages.shape[4], KEYS)
    columns = rank if box == KEYS else 64
    sizes = list(rows.shape), list(rows.stride())
    of_plain, of_rotated = (TensorDescriptor(rows, *sizes, [box, width], swizzled()) for width in (columns, 64))
    return of_plain, of_rotated


def num_warps(block_size: int, *, merges: bool) -> int:
    """Return the warps of a program.

    Every four warps read all of a tile for its scores, so four are faster than eight; but they have no registers to
    merge lanes, nor to fetch a tile from several blocks.
    """
    return 8 if merges or block_size < KEYS else 4


@constexpr_function
def swizzled() -> Any:
    """Return the layout of rows in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon_jit
def fetch_rows(to, source, offset, there, FIRST: gl.constexpr, WARPS: gl.constexpr):
    """Begin the copy of rows, row r from source + offset[r] + FIRST on; zeros for those that are not there."""
    WIDTH: gl.constexpr = to.shape[1]
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, rows_layout(WIDTH, WARPS)))
    pointers = source + offset[:, None] + column[None, :]
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [16, 16]), [1, 8])
    async_copy.async_copy_global_to_shared(to, pointers, mask=there[:, None] & (column >= 0)[None, :])


@gluon_jit
def fetch_queries(to, q, token, stop, FIRST: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr):
    """Begin the copy of columns from FIRST on of HEADS of each of TOKENS, of tokens before `stop`."""
    member = gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, rows_layout(to.shape[1], WARPS)))
    head, of_token = gl.program_id(1) * C.HEADS + member % C.HEADS, token + member // C.HEADS
    at = (of_token.to(gl.int64) * C.NUM_HEADS + head) * (C.RANK + C.ROTATED)
    fetch_rows(to, q, at, (head < C.NUM_HEADS) & (of_token < stop), FIRST, WARPS)


@gluon_jit
def row_of(table, key, stop, places, C: gl.constexpr):
    """Return the row of the descriptors of a key; from `stop` on one that reads as zeros, behind the last."""
    layer_row, page_rows = places
    block = gl.load(table + key // C.BLOCK_SIZE, mask=key < stop, other=0)
    return gl.where(key < stop, block * page_rows + layer_row + key % C.BLOCK_SIZE, 0x7FFFFF00)


@gluon_jit
def fetch_keys(cs, rs, caches, row, pages, first, ready, C: gl.constexpr):
    """Begin the copy of the latents of keys from `first` on, which is at `row`; `ready` is signalled at its end."""
    of_plain, of_rotated = caches
    table, stop, places = pages
    KEYS: gl.constexpr = cs.shape[0]
    RANK: gl.constexpr = cs.shape[1]
    BOX: gl.constexpr = of_plain.block_type.shape[0]
    mbarrier.expect(ready, KEYS * (RANK + rs.shape[1]) * 2)
    if BOX == KEYS:
        tma.async_copy_global_to_shared(of_plain, [row, 0], ready, cs)
        tma.async_copy_global_to_shared(of_rotated, [row, RANK], ready, rs)
    else:
        # In shared memory columns 0 ... 63 of all keys are followed by columns 64 ... 127, and so on.
        BOXES: gl.constexpr = KEYS // BOX
        plain = cs._reinterpret(cs.dtype, [RANK // 64 * BOXES, BOX, 64], cs.layout)
        rotated = rs._reinterpret(rs.dtype, [BOXES, BOX, 64], rs.layout)
        for box in range(BOXES):
            at = row_of(table, first + box * BOX, stop, places, C)
            for part in gl.static_range(RANK // 64):
                to = plain.index(part * BOXES + box)
                tma.async_copy_global_to_shared(of_plain, [at, part * 64], ready, to)
            tma.async_copy_global_to_shared(of_rotated, [at, RANK], ready, rotated.index(box))


@gluon_jit
def clear_tail(to, valid, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Clear the rows of a tile from `valid` on, ROWS at a time: where no key is may be NaN, and 0 · NaN is NaN."""
    KEYS: gl.constexpr = to.shape[0]
    layout: gl.constexpr = rows_layout(to.shape[1], WARPS)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    for first in gl.static_range(0, KEYS, ROWS):
        if first + ROWS > valid:
            some = to.slice(first, ROWS)
            some.store(gl.where((first + row < valid)[:, None], some.load(layout), 0.0))


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
def num_steps(stop, number, lanes, C: gl.constexpr, KEYS: gl.constexpr):
    """Return the tiles of the keys before `stop` in the lanes number, number + lanes, ..."""
    own = ((stop + C.LANE - 1) // C.LANE - number + lanes - 1) // lanes
    in_last = gl.minimum(stop - (number + (own - 1) * lanes) * C.LANE, C.LANE)
    return gl.where(own > 0, (own - 1) * (C.LANE // KEYS) + (in_last + KEYS - 1) // KEYS, 0)


@gluon_jit
def key_of(step, number, lanes, C: gl.constexpr, KEYS: gl.constexpr):
    """Return the first key of a tile of these lanes."""
    STEPS: gl.constexpr = C.LANE // KEYS
    return (number + step // STEPS * lanes) * C.LANE + step % STEPS * KEYS


@gluon_jit
def init_barriers(ready):
    """Set the barriers of a ring up."""
    NS: gl.constexpr = ready.shape[0]
    for i in gl.static_range(NS):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()


@gluon_jit
def fetch_first(ring, caches, pages, lanes, span, C: gl.constexpr):
    """Begin the copies of those first tiles of a ring that end behind the first number of a span, not its second.

    lanes: the tiles of the program, its first lane, and from one of its lanes to the next.
    """
    cs, rs, ready = ring
    begin, end = span
    table, stop, places = pages
    steps, number, stride = lanes
    NS: gl.constexpr = cs.shape[0]
    KEYS: gl.constexpr = cs.shape[1]
    for i in gl.static_range(NS):
        key = key_of(i, number, stride, C, KEYS)
        if (i < steps) & (key + KEYS > begin) & (key + KEYS <= end):
            at = row_of(table, key, stop, places, C)
            fetch_keys(cs.index(i), rs.index(i), caches, at, pages, key, ready.index(i), C)


@gluon_jit
def latent_ring_kernel(
    q, of_plain, of_rotated, out, parts, query_start, context_len, tables, num_rows, num_lanes, scale, places,
    table_stride, C: gl.constexpr, IS_ONE: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend as `latent_kernel` does. IS_ONE: every row has one query; WARPS: of a program, four or eight.

    of_plain, of_rotated: `descriptors`; places: their rows up to the layer's in block 0, and from block to block.
    With `parts`, which have room for num_lanes lanes, program (., ., n) of m has lanes n, n + m, ...
    """
    N: gl.constexpr = C.TOKENS * C.HEADS
    RANK: gl.constexpr = C.RANK
    ROTATED: gl.constexpr = C.ROTATED
    NS: gl.constexpr = 2
    KEYS: gl.constexpr = 64
    BESIDE: gl.constexpr = WARPS // 4
    kind: gl.constexpr = q.dtype.element_ty
    shape: gl.constexpr = [16, N // BESIDE, 16]
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, BESIDE], instr_shape=shape)
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, N, 16])
    if IS_ONE:
        row = gl.program_id(0)
        first_query, count, first = row, 1, 0
    else:
        row, first_query, count, first = find_tile(query_start, num_rows, gl.program_id(0), C.TOKENS)
    of_row = gl.load(context_len + row) - count - first_query
    token = first_query + first
    end = first_query + count
    stop = of_row + gl.minimum(token + C.TOKENS, end)
    number, lanes = 0, 1
    if parts is not None:
        number, lanes = gl.program_id(2), gl.num_programs(2)
    steps = gl.where(first < count, num_steps(stop, number, lanes, C, KEYS), 0)
    cs = gl.allocate_shared_memory(kind, [NS, KEYS, RANK], swizzled())
    rs = gl.allocate_shared_memory(kind, [NS, KEYS, ROTATED], swizzled())
    ready = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    table = tables + row.to(gl.int64) * table_stride
    caches, pages = (of_plain, of_rotated), (table, stop, places)
    init_barriers(ready)
    # The kernel before writes the latents of this step's tokens; those of earlier ones are fetched while it runs, for
    # the kernels before it are done.
    old = of_row + first_query
    ring = (cs, rs, ready)
    fetch_first(ring, caches, pages, (steps, number, lanes), (0, old), C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if parts is not None:
        gl.store(parts[3] + token, (stop + C.LANE - 1) // C.LANE, mask=(first < count) & (number == 0))
    if steps > 0:
        qs = gl.allocate_shared_memory(kind, [N, RANK], swizzled())
        turned = gl.allocate_shared_memory(kind, [N, ROTATED], swizzled())
        ps = gl.allocate_shared_memory(kind, [N, KEYS], swizzled())
        shrunk = gl.allocate_shared_memory(gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        fetch_first(ring, caches, pages, (steps, number, lanes), (old, stop + KEYS), C)
        fetch_queries(qs, q, token, end, 0, C, WARPS)
        fetch_queries(turned, q, token, end, RANK, C, WARPS)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        column: gl.constexpr = gl.SliceLayout(0, scores)
        last = of_row + token + gl.arange(0, N, layout=column) // C.HEADS
        within = gl.arange(0, KEYS, layout=gl.SliceLayout(1, scores))
        of_sums: gl.constexpr = gl.SliceLayout(0, sums)
        member = gl.arange(0, N, layout=of_sums)
        head = gl.program_id(1) * C.HEADS + member % C.HEADS
        real = (head < C.NUM_HEADS) & (token + member // C.HEADS < end)
        pair = (token + member // C.HEADS).to(gl.int64) * C.NUM_HEADS + head
        plain = gl.arange(0, RANK, layout=gl.SliceLayout(1, sums))
        most, total, acc = empty(N, RANK, scores, sums)
        kept_most, kept_total, kept_acc = empty(N, RANK, scores, sums)
        for i in range(steps):
            slot = i % NS
            key = key_of(i, number, lanes, C, KEYS)
            after = key_of(i + NS, number, lanes, C, KEYS)
            # Of the tile that will be fetched when this one is done.
            at = row_of(table, after, stop, places, C)
            mbarrier.wait(ready.index(slot), i // NS & 1)
            if key + KEYS > stop:
                clear_tail(cs.index(slot), stop - key, 16, WARPS)
                clear_tail(rs.index(slot), stop - key, KEYS, WARPS)
                fence_async_shared()
                gl.thread_barrier()
            s = gl.zeros([KEYS, N], gl.float32, scores)
            s = warpgroup_mma(cs.index(slot), qs.permute([1, 0]), s, is_async=True)
            s = warpgroup_mma(rs.index(slot), turned.permute([1, 0]), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            seen = (key + within)[:, None] <= last[None, :]
            s = gl.where(seen, s * scale, -float("inf"))
            largest = gl.maximum(most, gl.max(s, 0))
            base = gl.where(largest == -float("inf"), 0.0, largest)
            shrink = gl.exp2(most - base)
            p = gl.exp2(s - base[None, :])
            most = largest
            ps.permute([1, 0]).store(p.to(kind))
            shrunk.store(shrink)
            fence_async_shared()
            gl.thread_barrier()
            acc = acc * shrunk.load(of_sums)[None, :]
            acc = warpgroup_mma(cs.index(slot).permute([1, 0]), ps.permute([1, 0]), acc, is_async=True)
            # While the tensor cores multiply.
            total = gl.fma(total, shrink, gl.sum(p, 0))
            acc = warpgroup_mma_wait(0, deps=[acc])
            # All warps are done with the tile: its place is free.
            gl.thread_barrier()
            if i + NS < steps:
                fetch_keys(cs.index(slot), rs.index(slot), caches, at, pages, after, ready.index(slot), C)
            if ((i + 1) % (C.LANE // KEYS) == 0) | (i + 1 == steps):
                if parts is None:
                    kept_most, kept_total, kept_acc = fold(
                        (kept_most, kept_total, kept_acc), (most, total, acc), of_sums
                    )  # fmt: skip
                else:
                    place = pair * num_lanes + key // C.LANE
                    gl.store(parts[0] + place, gl.convert_layout(most, of_sums), mask=real)
                    gl.store(parts[1] + place, gl.convert_layout(total, of_sums), mask=real)
                    to = (parts[2] + place * RANK)[None, :] + plain[:, None]
                    gl.store(to, acc, mask=real[None, :] & (plain >= 0)[:, None])
                most, total, acc = empty(N, RANK, scores, sums)
        if parts is None:
            answer = (kept_acc / gl.convert_layout(kept_total, of_sums)[None, :]).to(out.dtype.element_ty)
            to = out + pair[None, :] * RANK + plain[:, None]
            gl.store(to, answer, mask=real[None, :] & (plain >= 0)[:, None])
