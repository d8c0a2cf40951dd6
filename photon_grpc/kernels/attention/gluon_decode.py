"""Attention of one query a row over a paged KV cache, in one Gluon kernel (sm_80 up).

    out[b] = softmax(scale · q[b] · K[: context_len[b]]ᵀ) · V[: context_len[b]], in the order of `key_order.py`

Long rows are shared by several programs, each of which takes whole lanes and leaves their sums; the last to finish
folds all of them in order. So the number of programs of a row, that of the warps and the length of the ring change no
bit. There are never more programs than the device holds at a time, and the fewer there are, the longer is the ring of
each: a multiprocessor's memory is full of keys in flight. `torch_attention.py` is the reference.

Shapes: q [M, Hq, D], pages [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata of B rows -> out [M, Hq, D].
bf16 and fp16; D in HEAD_DIMS, at most MAX_GROUP query heads for a key head.
Bytes moved: 2 · Hkv · D · itemsize for every key of every row; of rows that are shared the sums of their lanes twice.

The KW warps of a program work on one update together: in q Kᵀ the keys lie over the warps, then the scores are
exchanged through shared memory, every warp computes all weights, and in p V the columns lie over the warps. Products
are transposed, keys (or the head's dimensions) in their 16 rows and the group of query heads in their 8 columns: the
few heads of a group leave half as much of them empty as the other way round.

Keys and values pass through a ring of NS updates, the pages of an update looked up one step before its copy starts. The
newest key comes from the kernel before: with EARLY all updates of the ring but the one with that key are fetched before
the programmatic wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.combine_lanes import combine_lanes, store_lane
from photon_grpc.kernels.attention.decode_tiles import choose, limits_of
from photon_grpc.kernels.attention.key_order import CLASSES, num_lanes
from photon_grpc.kernels.attention.lane_sums import (
    class_sums,
    fold,
    fold_weights,
    num_classes,
    of_rows,
    sum_of_classes,
    update,
)
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.lang.gluon import (
    async_copy,
    constexpr_function,
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


@constexpr_function
def copy_layout(head_dim: int, warps: int):
    """Return the layout of copies [keys, D]: 16 bytes a thread, neighbouring threads along D."""
    threads = head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [warps, 1], [1, 0])


@constexpr_function
def paged_layout(head_dim: int, warps: int, block_size: int):
    """Return `copy_layout` of [pages, keys of a page, D], flattened the layout of [keys, D]."""
    threads = head_dim // 8
    of_page = max(1, min(warps, block_size * threads // 32))
    return gl.BlockedLayout([1, 1, 8], [1, 32 // threads, threads], [warps // of_page, of_page, 1], [2, 1, 0])


@gluon_jit
def look_up(table, key, stop, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Return the page of the UPDATE keys from `key` on: one number if they lie in one page, else one a page or key."""
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    UPDATE: gl.constexpr = TILE.UPDATE
    if BLOCK_SIZE % UPDATE == 0:
        page = gl.load(table + key // BLOCK_SIZE, mask=key < stop, other=0)
    elif UPDATE % BLOCK_SIZE == 0 and BLOCK_SIZE * SHAPE.HEAD_DIM >= 256:
        layout: gl.constexpr = paged_layout(SHAPE.HEAD_DIM, TILE.KW, BLOCK_SIZE)
        number = gl.arange(0, UPDATE // BLOCK_SIZE, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        page = gl.load(table + key // BLOCK_SIZE + number, mask=key + number * BLOCK_SIZE < stop, other=0)
    else:
        copy: gl.constexpr = copy_layout(SHAPE.HEAD_DIM, TILE.KW)
        keys = key + gl.arange(0, UPDATE, layout=gl.SliceLayout(1, copy))
        page = gl.load(table + keys // BLOCK_SIZE, mask=keys < stop, other=0)[:, None]
    return page


@gluon_jit
def fetch(ks, vs, keys, page, key, stop, block_stride, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start the copies of UPDATE keys and values from `key` on, with zeros from `stop` on."""
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    V_OFFSET: gl.constexpr = SHAPE.KV_HEADS * BLOCK_SIZE * HEAD_DIM
    UPDATE: gl.constexpr = TILE.UPDATE
    copy: gl.constexpr = copy_layout(HEAD_DIM, TILE.KW)
    number = gl.arange(0, UPDATE, layout=gl.SliceLayout(1, copy))[:, None]
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, copy))[None, :]
    if BLOCK_SIZE % UPDATE == 0:
        at = keys + page.to(gl.int64) * block_stride + key % BLOCK_SIZE * HEAD_DIM + (number * HEAD_DIM + column)
    elif UPDATE % BLOCK_SIZE == 0 and BLOCK_SIZE * HEAD_DIM >= 256:
        # One load a page, whose number then stands beside each of its keys.
        of_keys = page[:, None] + gl.full(
            [UPDATE // BLOCK_SIZE, BLOCK_SIZE], 0, gl.int32, page.type.layout.parent
        )  # fmt: skip
        of_keys = gl.convert_layout(gl.reshape(of_keys, [UPDATE]), gl.SliceLayout(1, copy), assert_trivial=True)
        page = of_keys[:, None]
        at = keys + (page.to(gl.int64) * block_stride + number % BLOCK_SIZE * HEAD_DIM) + column
    else:
        at = keys + (page.to(gl.int64) * block_stride + (key + number) % BLOCK_SIZE * HEAD_DIM) + column
    inside = (key + number < stop) & (column >= 0)
    async_copy.async_copy_global_to_shared(ks, at, mask=inside)
    async_copy.async_copy_global_to_shared(vs, at + V_OFFSET, mask=inside)


@gluon_jit
def load_query(q, SHAPE: gl.constexpr, TILE: gl.constexpr, right: gl.constexpr):
    """Load the queries of a group [D, HEADS], zeros where a head pads the group."""
    member = gl.arange(0, TILE.HEADS, layout=gl.SliceLayout(0, right))[None, :]
    column = gl.arange(0, SHAPE.HEAD_DIM, layout=gl.SliceLayout(1, right))[:, None]
    inside = (member < SHAPE.GROUP) & (column >= 0)
    return gl.load(q + (member * SHAPE.HEAD_DIM + column), mask=inside, other=0.0)


@gluon_jit
def empty_lane(HEAD_DIM: gl.constexpr, TILE: gl.constexpr, mma: gl.constexpr):
    """Return high [HEADS], total [HEADS, 8] and acc [D, HEADS] before the first key, in the layouts of `attend`."""
    UPDATE: gl.constexpr = TILE.UPDATE
    HEADS: gl.constexpr = TILE.HEADS
    scores = gl.zeros([UPDATE, HEADS], gl.float32, gl.DotOperandLayout(1, mma, 2))
    scores = gl.permute(scores, [1, 0])
    high = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
    classes = class_sums(scores)
    total = gl.full([HEADS, num_classes()], 0.0, gl.float32, classes.type.layout)
    return high, total, gl.zeros([HEAD_DIM, HEADS], gl.float32, mma)


@gluon_jit
def attend(ks, vs, query, high, total, acc, scale, num_keys, TILE: gl.constexpr, MASKED: gl.constexpr):
    """Attend to one update: K and V [UPDATE, D], query [D, HEADS]; with MASKED to the first `num_keys` of them.

    Each warp computes the scores of its own keys. Then every warp has all scores and computes all weights, and the sums
    of its own part of D.
    """
    UPDATE: gl.constexpr = TILE.UPDATE
    HEADS: gl.constexpr = TILE.HEADS
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    scores = mma_v2(ks.load(left), query, gl.zeros([UPDATE, HEADS], gl.float32, mma))
    scores = gl.convert_layout(scores, right)
    if MASKED:
        number = gl.arange(0, UPDATE, layout=gl.SliceLayout(1, right))[:, None]
        scores = gl.where(number < num_keys, scores, -float("inf"))
    p, shrink, high, total = update(gl.permute(scores, [1, 0]), high, total, scale, MASKED)
    p = gl.convert_layout(gl.permute(p.to(query.dtype), [1, 0]), right, assert_trivial=True)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, mma))[None, :]
    return high, total, mma_v2(vs.permute([1, 0]).load(left), p, acc)


@gluon_jit
def fold_lane(kept, lane):
    """Return the sums (high, total, acc) of the lanes so far and of one more."""
    kept_high, kept_total, kept_acc = kept
    lane_high, lane_total, lane_acc = lane
    high, kept_factor, lane_factor = fold_weights(kept_high, lane_high)
    total = fold(kept_total, lane_total, of_rows(kept_factor, kept_total), of_rows(lane_factor, kept_total))
    layout: gl.constexpr = gl.SliceLayout(0, kept_acc.type.layout)
    kept_factor = gl.convert_layout(kept_factor, layout)[None, :]
    return high, total, fold(kept_acc, lane_acc, kept_factor, gl.convert_layout(lane_factor, layout)[None, :])


@gluon_jit
def share_of(context, split, LANE: gl.constexpr):
    """Return the first key of a split, the one after its last, and how many splits the row has; all are whole lanes."""
    num_lanes = (context + LANE - 1) // LANE
    most_splits = gl.maximum(gl.minimum(num_lanes, gl.num_programs(2)), 1)
    length = (num_lanes + most_splits - 1) // most_splits * LANE
    begin = split * length
    return begin, gl.minimum(begin + length, context), (context + length - 1) // gl.maximum(length, 1)


@gluon_jit
def decode_attention_kernel(
    q, pages, out, partials, rows, scale, q_stride, block_stride, table_stride,
    SHAPE: gl.constexpr, TILE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute a split of the keys of one (key head, row) per program.

    rows: query_start, context_len, block_tables. With `query_start` row b's query is the one at query_start[b], and
    rows of several queries are left alone; without it (None) row b's query is q[b].
    partials: see `store_lane`; None where no row is SHARED.
    """
    query_start, context_len, block_tables = rows
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    GROUP: gl.constexpr = SHAPE.GROUP
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    UPDATE: gl.constexpr = TILE.UPDATE
    LANE: gl.constexpr = TILE.LANE
    NS: gl.constexpr = TILE.NS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[TILE.KW, 1], instr_shape=[16, 8])
    swizzle: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    kind: gl.constexpr = q.dtype.element_ty
    kv_head, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if not EARLY and PDL:
        gdc_wait()
    # Lengths and tables are older than the kernel before, which began to write only when all before it was complete.
    context = gl.load(context_len + row)
    query_row = row
    if query_start is not None:
        query_row = gl.load(query_start + row)
        context = gl.where(gl.load(query_start + row + 1) - query_row == 1, context, 0)
    begin, stop, num_splits = share_of(context, split, LANE)
    num_steps = (gl.maximum(stop - begin, 0) + UPDATE - 1) // UPDATE
    table = block_tables + row.to(gl.int64) * table_stride
    keys = pages + kv_head * (SHAPE.BLOCK_SIZE * HEAD_DIM)
    ks = gl.allocate_shared_memory(kind, [NS, UPDATE, HEAD_DIM], swizzle)
    vs = gl.allocate_shared_memory(kind, [NS, UPDATE, HEAD_DIM], swizzle)
    page = look_up(table, begin, stop, SHAPE, TILE)
    num_early = 0
    if EARLY:
        has_newest = (stop == context).to(gl.int32) if TILE.SHARED else 1
        num_early = gl.minimum(gl.maximum(num_steps - has_newest, 0), NS)
        for s in range(num_early):
            key = begin + s * UPDATE
            fetch(ks.index(s), vs.index(s), keys, page, key, stop, block_stride, SHAPE, TILE)
            async_copy.commit_group()
            page = look_up(table, key + UPDATE, stop, SHAPE, TILE)
    if PDL:
        if EARLY:
            gdc_wait()
        gdc_launch_dependents()
    if split < num_splits:
        group_query = q + (query_row.to(gl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM))
        query = load_query(group_query, SHAPE, TILE, gl.DotOperandLayout(1, mma, 2))
        for s in range(num_early, NS):
            key = begin + s * UPDATE
            if s < num_steps:
                fetch(ks.index(s), vs.index(s), keys, page, key, stop, block_stride, SHAPE, TILE)
            async_copy.commit_group()
            page = look_up(table, key + UPDATE, stop, SHAPE, TILE)
        head = row * (KV_HEADS * GROUP) + kv_head * GROUP
        high, total, acc = empty_lane(HEAD_DIM, TILE, mma)
        kept_high, kept_total, kept_acc = empty_lane(HEAD_DIM, TILE, mma)
        slot = 0
        for i in range(num_steps - 1):
            async_copy.wait_group(NS - 1)
            high, total, acc = attend(
                ks.index(slot), vs.index(slot), query, high, total, acc, scale, 0, TILE, False
            )  # fmt: skip
            key = begin + (i + NS) * UPDATE
            if key < stop:
                fetch(ks.index(slot), vs.index(slot), keys, page, key, stop, block_stride, SHAPE, TILE)
            async_copy.commit_group()
            page = look_up(table, key + UPDATE, stop, SHAPE, TILE)
            slot = gl.where(slot == NS - 1, 0, slot + 1)
            if (i + 1) % (LANE // UPDATE) == 0:
                if TILE.SHARED and num_splits > 1:
                    lane = (begin + i * UPDATE) // LANE
                    store_lane(partials, lane, high, total, acc, head, GROUP, KV_HEADS, HEAD_DIM)
                else:
                    kept_high, kept_total, kept_acc = fold_lane(
                        (kept_high, kept_total, kept_acc), (high, total, acc)
                    )  # fmt: skip
                high, total, acc = empty_lane(HEAD_DIM, TILE, mma)
        async_copy.wait_group(0)
        num_keys = stop - begin - (num_steps - 1) * UPDATE
        high, total, acc = attend(
            ks.index(slot), vs.index(slot), query, high, total, acc, scale, num_keys, TILE, True
        )  # fmt: skip
        to = out + (query_row.to(gl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + kv_head * (GROUP * HEAD_DIM))
        if TILE.SHARED and num_splits > 1:
            store_lane(partials, (stop - 1) // LANE, high, total, acc, head, GROUP, KV_HEADS, HEAD_DIM)
            combine_at_last(partials, to, row, kv_head, num_splits, context, SHAPE, TILE)
        else:
            _, total, acc = fold_lane((kept_high, kept_total, kept_acc), (high, total, acc))
            store_answer(to, total, acc, SHAPE, TILE)


@gluon_jit
def store_answer(to, total, acc, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Write the answers [GROUP, D] of a group to `to`."""
    total = gl.convert_layout(sum_of_classes(total, TILE.KW), gl.SliceLayout(0, acc.type.layout))
    member = gl.arange(0, TILE.HEADS, layout=gl.SliceLayout(0, acc.type.layout))[None, :]
    column = gl.arange(0, SHAPE.HEAD_DIM, layout=gl.SliceLayout(1, acc.type.layout))[:, None]
    answer = (acc / total[None, :]).to(to.dtype.element_ty)
    gl.store(to + (member * SHAPE.HEAD_DIM + column), answer, mask=(member < SHAPE.GROUP) & (column >= 0))


@gluon_jit
def combine_at_last(
    partials, to, row, kv_head, num_splits, context, SHAPE: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Fold the lanes of a row, in the last of its programs to arrive here, and set the counter back to zero."""
    GROUP: gl.constexpr = SHAPE.GROUP
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    gl.thread_barrier()
    counter = partials[3] + row * KV_HEADS + kv_head
    if gl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
        gl.store(counter, 0)
        head = row * (KV_HEADS * GROUP) + kv_head * GROUP
        num_lanes = (context + TILE.LANE - 1) // TILE.LANE
        combine_lanes(partials, to, head, num_lanes, GROUP, KV_HEADS, SHAPE.HEAD_DIM, TILE.KW)


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
    pdl = has_dependent_launch(q.device)
    rows = None, meta.context_len, meta.block_tables
    _launch(q, pages[:, layer], meta, out, rows, chain.counters, (chain.history_is_settled, pdl))


def launch_rows_of_one(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    counters: torch.Tensor,
) -> None:
    """Fill the rows of out [T, Hq, D] that have one query; counters as in a DependentChain."""
    rows = meta.query_start, meta.context_len, meta.block_tables
    _launch(q, pages[:, layer], meta, out, rows, counters, (False, False))


def _launch(
    q: torch.Tensor, pages: torch.Tensor, meta: AttentionMetadata, out: torch.Tensor,
    rows: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor], counters: torch.Tensor, starts: tuple[bool, bool],
) -> None:  # fmt: skip
    """Launch the kernel for one layer of the pages; `starts`: EARLY and PDL."""
    num_rows, kv_heads, head_dim = meta.context_len.shape[0], pages.shape[2], pages.shape[4]
    q_heads = q.shape[1]
    group = q_heads // kv_heads
    tile, splits = choose(num_rows * kv_heads, group, head_dim, meta.max_context_len, limits_of(q.device))
    partials = None
    if tile.SHARED:
        sums = num_lanes(meta.max_context_len, tile.LANE), num_rows, q_heads
        floats = partial(torch.empty, dtype=torch.float32, device=q.device)
        partials = floats((*sums, head_dim)), floats(sums), floats((*sums, CLASSES)), counters
    numbers = meta.log2_scale, q.stride(0), pages.stride(0), meta.block_tables.stride(0)
    options = {"launch_pdl": True} if starts[1] else {}
    decode_attention_kernel[(kv_heads, num_rows, splits)](
        q, pages, out, partials, rows, *numbers, PageShape(kv_heads, group, head_dim, pages.shape[3]), tile, *starts,
        num_warps=tile.KW, **options,
    )  # fmt: skip
