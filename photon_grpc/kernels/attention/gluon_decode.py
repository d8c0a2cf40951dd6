"""Attention of one query a row over a paged KV cache, in one Gluon kernel (sm_80 up).

    out[b] = softmax(scale · q[b] · K[: context_len[b]]ᵀ) · V[: context_len[b]]

Long rows are split over at most `splits` programs. Each writes its partial result, and the last to finish joins them in
the order of their numbers, so that the result is the same every time. A split is at least about MIN_SPLIT keys long;
the other programs of a short row return at once. There are never more programs than the device holds at a time, and the
fewer there are, the longer is the ring of each: a multiprocessor's memory is full of keys in flight. How a row is split
depends on its own length and, through `splits` and MIN_SPLIT, on the number of rows (a captured step's bucket) and the
longest context that the step allows, never on the lengths of other rows. `torch_attention.py` is the reference.

Shapes: q [M, Hq, D], pages [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata of B rows -> out [M, Hq, D].
bf16 and fp16; D in HEAD_DIMS, at most MAX_GROUP query heads for a key head.
Bytes moved: 2 · Hkv · D · itemsize for every key of every row.

One program takes a split of the keys of one (row, key head), each of its KW warps BN of KW · BN keys a step: products
have rank 3 with the warps along the batch axis, so that warps run independently until their results are joined at
the end. Products are transposed, keys (or the head's dimensions) in their 16 rows and the group of query heads in their
8 columns: the few heads of a group leave half as much of them empty as the other way round.

Keys and values pass through a ring of NS steps, the page of a step looked up one step before its copy starts. The
newest key comes from the kernel before: with EARLY all steps of the ring but the one with that key are fetched before
the programmatic wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.combine_splits import combine_splits
from photon_grpc.kernels.attention.decode_tiles import choose, limits_of
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.lang.gluon import (
    async_copy,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    has_dependent_launch,
    mma_v2,
)

HEAD_DIMS = (32, 64, 128)
MAX_GROUP = 16


class PageShape(NamedTuple):
    """Constants of the pages that the kernel is compiled for: GROUP query heads for each of KV_HEADS key heads."""

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    BLOCK_SIZE: int


@dataclass(frozen=True, eq=False, slots=True)
class DependentChain:
    """The state of callers whose kernels follow one another by programmatic dependent launch.

    counters: int32 [>= B · Hkv], zero before and after every kernel.
    history_is_settled: only a row's newest key was written since the chain began, so older keys are fetched while the
        kernel before still runs.
    """

    counters: torch.Tensor
    history_is_settled: bool = False


@gluon_jit
def look_up(table, key, stop, SHAPE: gl.constexpr, TILE: gl.constexpr, copy: gl.constexpr):
    """Return the page of the keys from `key` on: one number if the step lies in one page, else [KW, 1 or BN, 1]."""
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    BN: gl.constexpr = TILE.BN
    KW: gl.constexpr = TILE.KW
    if BLOCK_SIZE % (KW * BN) == 0:
        page = gl.load(table + key // BLOCK_SIZE, mask=key < stop, other=0)
    else:
        warp = gl.arange(0, KW, layout=gl.SliceLayout(1, gl.SliceLayout(2, copy)))[:, None, None]
        row = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy)))[None, :, None]
        keys = key + warp * BN
        if BLOCK_SIZE % BN != 0:
            keys += row
        page = gl.load(table + keys // BLOCK_SIZE, mask=keys < stop, other=0)
    return page


@gluon_jit
def fetch(
    ks, vs, keys, page, key, stop, block_stride, SHAPE: gl.constexpr, TILE: gl.constexpr, copy: gl.constexpr
):  # fmt: skip
    """Start the copies of KW · BN keys and values, with zeros from `stop` on."""
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    V_OFFSET: gl.constexpr = SHAPE.KV_HEADS * BLOCK_SIZE * HEAD_DIM
    BN: gl.constexpr = TILE.BN
    KW: gl.constexpr = TILE.KW
    warp = gl.arange(0, KW, layout=gl.SliceLayout(1, gl.SliceLayout(2, copy)))[:, None, None]
    row = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy)))[None, :, None]
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, copy)))[None, None, :]
    number = warp * BN + row
    if BLOCK_SIZE % (KW * BN) == 0:
        at = keys + page.to(gl.int64) * block_stride + key % BLOCK_SIZE * HEAD_DIM + (number * HEAD_DIM + column)
    else:
        at = keys + (page.to(gl.int64) * block_stride + (key + number) % BLOCK_SIZE * HEAD_DIM) + column
    inside = (key + number < stop) & (column >= 0)
    async_copy.async_copy_global_to_shared(ks, at, mask=inside)
    async_copy.async_copy_global_to_shared(vs, at + V_OFFSET, mask=inside)


@gluon_jit
def attend(
    ks, vs, query, high, total, acc, scale, num_keys, TILE: gl.constexpr, MASKED: gl.constexpr, mma: gl.constexpr
):  # fmt: skip
    """Attend to KW · BN keys: K and V [KW, BN, D], query [KW, D, HEADS]; with MASKED to the first `num_keys` of them.

    Returns the new high [KW, HEADS] in units of q · k, total [KW, BN, HEADS] not yet summed over keys, acc [KW, D,
    HEADS].
    """
    BN: gl.constexpr = TILE.BN
    KW: gl.constexpr = TILE.KW
    HEADS: gl.constexpr = TILE.HEADS
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    scores = mma_v2(ks.load(left), query, gl.zeros([KW, BN, HEADS], gl.float32, mma))
    if MASKED:
        warp = gl.arange(0, KW, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
        number = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
        scores = gl.where(warp * BN + number < num_keys, scores, -float("inf"))
    top = gl.maximum(high, gl.max(scores, 1))
    base = top
    if MASKED:
        # A warp that has seen no key has no maximum to subtract.
        base = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(scores * scale - (base * scale)[:, None, :])
    shrink = gl.exp2((high - base) * scale)
    total = total * shrink[:, None, :] + p
    acc = acc * shrink[:, None, :]
    acc = mma_v2(vs.permute([0, 2, 1]).load(left), gl.convert_layout(p.to(query.dtype), right), acc)
    return top, total, acc


@gluon_jit
def load_query(
    q, is_one, SHAPE: gl.constexpr, TILE: gl.constexpr, right: gl.constexpr
):  # fmt: skip
    """Load the queries of a group [KW, D, HEADS], the same for every warp; zeros if the row has not one query."""
    GROUP: gl.constexpr = SHAPE.GROUP
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    HEADS: gl.constexpr = TILE.HEADS
    warp = gl.arange(0, TILE.KW, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))[:, None, None]
    member = gl.arange(0, HEADS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))[None, :, None]
    inside = is_one & (member < GROUP) & (column >= 0) & (warp >= 0)
    return gl.load(q + (member * HEAD_DIM + column + warp * 0), mask=inside, other=0.0)


@gluon_jit
def decode_attention_kernel(
    q, pages, out, partials, rows, scale, q_stride, block_stride, table_stride,
    SHAPE: gl.constexpr, TILE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute a split of the keys of one (key head, row) per program.

    rows: query_start, context_len, block_tables. With `query_start` row b's query is the one at query_start[b], and
    rows of several queries are left alone; without it (None) row b's query is q[b].
    partials: partial float32 [B, Hq, SPLITS, D], its log2 weight [B, Hq, SPLITS], counters; None where SPLITS is 1.
    """
    query_start, context_len, block_tables = rows
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    GROUP: gl.constexpr = SHAPE.GROUP
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    HEADS: gl.constexpr = TILE.HEADS
    SPLITS: gl.constexpr = TILE.SPLITS
    MIN_SPLIT: gl.constexpr = TILE.MIN_SPLIT
    BN: gl.constexpr = TILE.BN
    KW: gl.constexpr = TILE.KW
    NS: gl.constexpr = TILE.NS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[KW, 1, 1], instr_shape=[1, 16, 8])
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    TD: gl.constexpr = HEAD_DIM // 8
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // TD, TD], [KW, 1, 1], [2, 1, 0])
    swizzle: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    kind: gl.constexpr = q.dtype.element_ty
    STEP: gl.constexpr = KW * BN
    # Where a split may begin: a step with one look-up lies in one page, else a warp's part of it does.
    GRAIN: gl.constexpr = STEP if BLOCK_SIZE % STEP == 0 else BN
    kv_head, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if not EARLY and PDL:
        gdc_wait()
    # Lengths and tables are older than the kernel before, which began to write only when all before it was complete.
    context = gl.load(context_len + row)
    query_row = row
    if query_start is not None:
        query_row = gl.load(query_start + row)
        context = gl.where(gl.load(query_start + row + 1) - query_row == 1, context, 0)
    most_splits = gl.maximum(gl.minimum((context + MIN_SPLIT - 1) // MIN_SPLIT, SPLITS), 1)
    length = (context + most_splits * GRAIN - 1) // (most_splits * GRAIN) * GRAIN
    num_splits = (context + length - 1) // gl.maximum(length, 1)
    begin = split * length
    stop = gl.minimum(begin + length, context)
    num_steps = (gl.maximum(stop - begin, 0) + STEP - 1) // STEP
    table = block_tables + row.to(gl.int64) * table_stride
    keys = pages + kv_head * (BLOCK_SIZE * HEAD_DIM)
    ks = gl.allocate_shared_memory(kind, [NS, KW, BN, HEAD_DIM], swizzle)
    vs = gl.allocate_shared_memory(kind, [NS, KW, BN, HEAD_DIM], swizzle)
    page = look_up(table, begin, stop, SHAPE, TILE, copy)
    num_early = 0
    if EARLY:
        has_newest = 1 if SPLITS == 1 else (stop == context).to(gl.int32)
        num_early = gl.minimum(gl.maximum(num_steps - has_newest, 0), NS)
        for s in range(num_early):
            key = begin + s * STEP
            fetch(ks.index(s), vs.index(s), keys, page, key, stop, block_stride, SHAPE, TILE, copy)
            async_copy.commit_group()
            page = look_up(table, key + STEP, stop, SHAPE, TILE, copy)
    if PDL:
        if EARLY:
            gdc_wait()
        gdc_launch_dependents()
    if split < num_splits:
        group_query = q + (query_row.to(gl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM))
        query = load_query(group_query, context > 0, SHAPE, TILE, right)
        for s in range(num_early, NS):
            key = begin + s * STEP
            if s < num_steps:
                fetch(ks.index(s), vs.index(s), keys, page, key, stop, block_stride, SHAPE, TILE, copy)
            async_copy.commit_group()
            page = look_up(table, key + STEP, stop, SHAPE, TILE, copy)
        high = gl.full([KW, HEADS], -float("inf"), gl.float32, gl.SliceLayout(1, mma))
        total = gl.zeros([KW, BN, HEADS], gl.float32, mma)
        acc = gl.zeros([KW, HEAD_DIM, HEADS], gl.float32, mma)
        slot = 0
        for i in range(num_steps - 1):
            async_copy.wait_group(NS - 1)
            high, total, acc = attend(
                ks.index(slot), vs.index(slot), query, high, total, acc, scale, 0, TILE, False, mma
            )
            key = begin + (i + NS) * STEP
            if key < stop:
                fetch(ks.index(slot), vs.index(slot), keys, page, key, stop, block_stride, SHAPE, TILE, copy)
            async_copy.commit_group()
            page = look_up(table, key + STEP, stop, SHAPE, TILE, copy)
            slot = gl.where(slot == NS - 1, 0, slot + 1)
        async_copy.wait_group(0)
        num_keys = stop - begin - (num_steps - 1) * STEP
        high, total, acc = attend(
            ks.index(slot), vs.index(slot), query, high, total, acc, scale, num_keys, TILE, True, mma
        )
        store_split(
            (high, total, acc), out, partials, scale, query_row, kv_head, split, num_splits, SHAPE, TILE, mma
        )  # fmt: skip


@gluon_jit
def store_split(
    sums, out, partials, scale, row, kv_head, split, num_splits,
    SHAPE: gl.constexpr, TILE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Join the (high, total, acc) of the warps and, once the last of several splits is done, those of the splits."""
    high, total, acc = sums
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    GROUP: gl.constexpr = SHAPE.GROUP
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    HEADS: gl.constexpr = TILE.HEADS
    SPLITS: gl.constexpr = TILE.SPLITS
    layout: gl.constexpr = gl.SliceLayout(0, mma)
    total = gl.sum(total, 1)
    top = gl.max(high, 0)
    factor = gl.exp2((high - top[None, :]) * scale)
    total = gl.convert_layout(gl.sum(total * factor, 0), gl.SliceLayout(0, layout))
    weight = gl.convert_layout(top, gl.SliceLayout(0, layout)) * scale + gl.log2(total)
    acc = gl.sum(acc * factor[:, None, :], 0) / total[None, :]
    member = gl.arange(0, HEADS, layout=gl.SliceLayout(0, layout))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, layout))
    is_head = member < GROUP
    head = row * (KV_HEADS * GROUP) + kv_head * GROUP + member
    to = out + (row.to(gl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + kv_head * (GROUP * HEAD_DIM))
    to += member[None, :] * HEAD_DIM + column[:, None]
    kind: gl.constexpr = out.dtype.element_ty
    if SPLITS == 1:
        gl.store(to, acc.to(kind), mask=is_head[None, :])
    else:
        partial, partial_weight, counters = partials
        if num_splits == 1:
            gl.store(to, acc.to(kind), mask=is_head[None, :])
        else:
            place = head * SPLITS
            gl.store(partial + (place + split)[None, :] * HEAD_DIM + column[:, None], acc, mask=is_head[None, :])
            gl.store(partial_weight + place + split, weight, mask=is_head)
            gl.thread_barrier()
            counter = counters + row * KV_HEADS + kv_head
            if gl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                gl.store(counter, 0)
                first = row * (KV_HEADS * GROUP) + kv_head * GROUP
                combine_splits(partial, partial_weight, out, first, num_splits, GROUP, HEAD_DIM, SPLITS, TILE.KW)


def shape(group: int, pages: torch.Tensor) -> PageShape:
    """Return the constants of layers with `group` query heads for a key head."""
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    return PageShape(kv_heads, group, head_dim, block_size)


def launch(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    chain: DependentChain,
) -> None:
    """Attend in a dependent chain for rows of one query: row b's is q[b], q [M, Hq, D] from B on is left alone."""
    num_rows, kv_heads, head_dim = meta.context_len.shape[0], pages.shape[3], pages.shape[5]
    q_heads = q.shape[1]
    num_pairs, group = num_rows * kv_heads, q_heads // kv_heads
    tile = choose(num_pairs, group, head_dim, meta.max_context_len, limits_of(q.device))
    partials = None
    if tile.SPLITS > 1:
        partial = torch.empty((num_rows, q_heads, tile.SPLITS, head_dim), dtype=torch.float32, device=q.device)
        weight = torch.empty((num_rows, q_heads, tile.SPLITS), dtype=torch.float32, device=q.device)
        partials = partial, weight, chain.counters
    pdl = has_dependent_launch(q.device)
    options = {"launch_pdl": True} if pdl else {}
    rows = None, meta.context_len, meta.block_tables
    numbers = meta.log2_scale, q.stride(0), pages.stride(0), meta.block_tables.stride(0)
    constants = shape(group, pages), tile, chain.history_is_settled, pdl
    decode_attention_kernel[(kv_heads, num_rows, tile.SPLITS)](
        q, pages[:, layer], out, partials, rows, *numbers, *constants, num_warps=tile.KW, **options
    )


def launch_rows_of_one(
    q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor
) -> None:
    """Fill the rows of out [T, Hq, D] that have one query, in a batch with so many rows that none is split."""
    num_rows, kv_heads, head_dim = meta.context_len.shape[0], pages.shape[3], pages.shape[5]
    group = q.shape[1] // kv_heads
    tile = choose(num_rows * kv_heads, group, head_dim, meta.max_context_len, limits_of(q.device))._replace(SPLITS=1)
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = meta.log2_scale, q.stride(0), pages.stride(0), meta.block_tables.stride(0)
    constants = shape(group, pages), tile, False, False
    decode_attention_kernel[(kv_heads, num_rows, 1)](
        q, pages[:, layer], out, None, rows, *numbers, *constants, num_warps=tile.KW
    )
