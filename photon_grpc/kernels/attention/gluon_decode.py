"""Attention of one query a row, or of a few, over a paged KV cache, in one Gluon kernel (sm_80 up).

    out[b] = softmax(scale · q[b] · K[first : context_len[b]]ᵀ) · V[first : context_len[b]], in the order of
    `key_order.py`; first = max(0, context_len[b] - window), or 0 without a window

Long rows are shared by several programs, each of which takes whole lanes and leaves their sums; the last to finish
folds all of them in order. So the number of programs of a row, that of the warps and the length of the ring change no
bit. There are never more programs than the device holds at a time, and the fewer there are, the longer is the ring of
each: a multiprocessor's memory is full of keys in flight. `torch_attention.py` is the reference.

Shapes: q [M, Hq, D], pages [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata of B rows -> out [M, Hq, D].
bf16 and fp16, pages also e4m3 with the constants of `meta.kv_scales`; D in HEAD_DIMS (e4m3: from 64 on), at most
MAX_GROUP query heads for a key head, at most MAX_QUERIES queries a row.
Bytes moved: 2 · Hkv · D · itemsize for every key in sight of every row; of rows that are shared the sums of their lanes
twice.

The KW warps of a program work on one update together: in q Kᵀ the keys lie over the warps, then the scores are
exchanged through shared memory, every warp computes all weights, and in p V the columns lie over the warps. Products
are transposed, keys (or the head's dimensions) in their 16 rows and the group of query heads in their 8 columns: the
few heads of a group leave half as much of them empty as the other way round. Where a row has several queries, the
columns are (query, head) pairs, 8 or 16 a program, and further programs take the pairs that are left: they find the
keys in the second-level cache. Each column has its own first and last key, and its sums are those of a row of that
one query: an update in which a query sees no key changes nothing.

Keys and values pass through a ring of NS updates, the pages of an update looked up one step before its copy starts. The
newest key comes from the kernel before: with EARLY all updates of the ring but the one with that key are fetched before
the programmatic wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from photon_grpc.kernels.attention.combine_lanes import fold_lanes, of_pairs, store_lane
from photon_grpc.kernels.attention.decode_columns import (
    limits,
    load_query,
    programs_a_head,
    programs_and_pairs,
    queries_at_once,
    store_answers,
)
from photon_grpc.kernels.attention.decode_ring import (
    PageShape,
    columns_of,
    fetch,
    load_keys,
    load_values,
    look_up,
    ring_layout,
    scaled,
)
from photon_grpc.kernels.attention.decode_rows import bounds_of, queries_of, share_of
from photon_grpc.kernels.attention.decode_tiles import choose, divided, lanes_in_sight, limits_of
from photon_grpc.kernels.attention.key_order import CLASSES
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
from photon_grpc.kernels.attention.products_of_8_bits import product_type, rounded_query
from photon_grpc.kernels.lang.gluon import (
    async_copy,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    has_dependent_launch,
    mma_v2,
)
from photon_grpc.kernels.lang.jit import next_power_of_2

HEAD_DIMS = (32, 64, 128, 256)
MAX_GROUP = 16
MAX_QUERIES = 8
# head_dim -> the most (query, head) pairs of a row that is alone in its step: with more the prompt kernel is faster.
MAX_LONE_PAIRS = {32: 0, 64: 4096, 128: 2048, 256: 0}


@dataclass(frozen=True, eq=False, slots=True)
class DependentChain:
    """The state of callers whose kernels follow one another by programmatic dependent launch.

    counters: int32 [>= B · Hkv], zero before and after every kernel.
    history_is_settled: of a row's keys only those of its queries were written since the chain began, so older keys are
        fetched while the kernel before still runs.
    """

    counters: torch.Tensor
    history_is_settled: bool = False


@gluon_jit
def empty_lane(HEAD_DIM: gl.constexpr, TILE: gl.constexpr, mma: gl.constexpr):
    """Return high [COLUMNS], total [COLUMNS, 8], acc [D, COLUMNS] before the first key, in the layouts of `attend`."""
    UPDATE: gl.constexpr = TILE.UPDATE
    COLUMNS: gl.constexpr = TILE.COLUMNS
    scores = gl.zeros([UPDATE, COLUMNS], gl.float32, gl.DotOperandLayout(1, mma, 2))
    scores = gl.permute(scores, [1, 0])
    high = gl.full([COLUMNS], -float("inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
    classes = class_sums(scores)
    total = gl.full([COLUMNS, num_classes()], 0.0, gl.float32, classes.type.layout)
    return high, total, gl.zeros([HEAD_DIM, COLUMNS], gl.float32, mma)


@gluon_jit
def score(ks, query, SHAPE: gl.constexpr, TILE: gl.constexpr, mma: gl.constexpr):
    """Return scores [UPDATE, COLUMNS] of keys [UPDATE, D] and query [D, COLUMNS]: each warp those of its own keys."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    UPDATE: gl.constexpr = TILE.UPDATE
    COLUMNS: gl.constexpr = TILE.COLUMNS
    return mma_v2(load_keys(ks, left, SHAPE, TILE), query, gl.zeros([UPDATE, COLUMNS], gl.float32, mma))


@gluon_jit
def attend(
    scores, vs, kind: gl.constexpr, high, total, acc, scale, seen,
    SHAPE: gl.constexpr, TILE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Attend to one update: its scores, and values [UPDATE, D]; with MASKED to what a column sees of it.

    Every warp gets all scores and computes all weights, and the sums of its own part of D. seen: the number of keys
    before the one after the last that each column sees.
    """
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    scores = gl.convert_layout(scores, right)
    if MASKED:
        number = gl.arange(0, TILE.UPDATE, layout=gl.SliceLayout(1, right))[:, None]
        visible = number < seen
        if SHAPE.WINDOW:
            visible = visible & (number >= seen - SHAPE.WINDOW)
        scores = gl.where(visible, scores, -float("inf"))
    p, shrink, high, total = update(gl.permute(scores, [1, 0]), high, total, scale, MASKED)
    p = gl.convert_layout(gl.permute(p.to(kind), [1, 0]), right, assert_trivial=True)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, mma))[None, :]
    return high, total, mma_v2(load_values(vs, left, SHAPE, TILE), p, acc)


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
def decode_attention_kernel(
    q, pages, out, partials, rows, scales, scale, q_stride, block_stride, table_stride,
    SHAPE: gl.constexpr, TILE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute a split of the keys of one (key head, row), for some of its queries, per program.

    rows: query_start, context_len, block_tables. With `query_start` row b's queries are those from query_start[b] on,
    and rows of more than QUERIES are left alone; without it (None) row b's one query is q[b].
    partials: see `store_lane`; None where no row is SHARED.
    scales: float32 [2, KV_HEADS], of keys and of values in pages of 8 bits; None: pages have the type of q.
    """
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    GROUP: gl.constexpr = SHAPE.GROUP
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    QUERIES: gl.constexpr = SHAPE.QUERIES
    UPDATE: gl.constexpr = TILE.UPDATE
    LANE: gl.constexpr = TILE.LANE
    NS: gl.constexpr = TILE.NS
    AT_ONCE: gl.constexpr = queries_at_once(GROUP, QUERIES, HEAD_DIM, SHAPE.PAIRS)
    PAIRS: gl.constexpr = GROUP * AT_ONCE
    PROGRAMS: gl.constexpr = programs_a_head(GROUP, QUERIES, HEAD_DIM, SHAPE.PAIRS)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[TILE.KW, 1], instr_shape=[16, 8])
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    swizzle: gl.constexpr = ring_layout(HEAD_DIM, SHAPE.CHUNK)
    kind: gl.constexpr = product_type(q.dtype.element_ty, SHAPE.CHUNK)
    of_pages: gl.constexpr = pages.dtype.element_ty
    place, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    kv_head = place // PROGRAMS
    v_scale = 1.0
    if scales is not None:
        scale = scale * gl.load(scales + kv_head)
        v_scale = gl.load(scales + KV_HEADS + kv_head)
    if not EARLY and PDL:
        gdc_wait()
    # Lengths and tables are older than the kernel before, which began to write only when all before it was complete.
    query_row, count, context, first = queries_of(rows, row, SHAPE)
    queries = place % PROGRAMS * AT_ONCE, count
    begin, stop, num_splits = share_of(first, context, split, SHAPE, TILE)
    num_steps = (gl.maximum(stop - begin, 0) + UPDATE - 1) // UPDATE
    span = first, stop
    table = rows[2] + row.to(gl.int64) * table_stride
    keys = pages + kv_head * (SHAPE.BLOCK_SIZE * HEAD_DIM)
    ks = gl.allocate_shared_memory(of_pages, [NS, UPDATE, HEAD_DIM], swizzle)
    vs = gl.allocate_shared_memory(of_pages, [NS, UPDATE, HEAD_DIM], swizzle)
    page = look_up(table, begin, stop, SHAPE, TILE)
    num_early = 0
    if EARLY:
        if QUERIES == 1:
            has_newest = (stop == context).to(gl.int32) if TILE.SHARED else 1
            num_settled = num_steps - has_newest
        else:
            num_settled = gl.minimum((context - count - begin) // UPDATE, num_steps)
        num_early = gl.minimum(gl.maximum(num_settled, 0), NS)
        for s in range(num_early):
            key = begin + s * UPDATE
            fetch(ks.index(s), vs.index(s), keys, page, key, span, block_stride, SHAPE, TILE)
            async_copy.commit_group()
            page = look_up(table, key + UPDATE, stop, SHAPE, TILE)
    if PDL:
        if EARLY:
            gdc_wait()
        gdc_launch_dependents()
    if split < num_splits:
        group_query = q + (query_row.to(gl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM))
        query = rounded_query(load_query(group_query, q_stride, queries, SHAPE, TILE, right), kind)
        for s in range(num_early, NS):
            key = begin + s * UPDATE
            if s < num_steps:
                fetch(ks.index(s), vs.index(s), keys, page, key, span, block_stride, SHAPE, TILE)
            async_copy.commit_group()
            page = look_up(table, key + UPDATE, stop, SHAPE, TILE)
        limit = limits(context, queries, SHAPE, TILE, right)
        head = row * (KV_HEADS * PROGRAMS * PAIRS) + place * PAIRS
        high, total, acc = empty_lane(HEAD_DIM, TILE, mma)
        kept_high, kept_total, kept_acc = empty_lane(HEAD_DIM, TILE, mma)
        slot = 0
        bounds = bounds_of(begin, context, count, num_steps, SHAPE, TILE)
        for PART in gl.static_range(3):
            if PART == 1 or (PART == 0 and SHAPE.WINDOW > 0) or (PART == 2 and QUERIES > 1):
                for i in range(bounds[PART], bounds[PART + 1]):
                    async_copy.wait_group(NS - 1)
                    scores = score(ks.index(slot), query, SHAPE, TILE, mma)
                    seen = limit - (begin + i * UPDATE) if PART != 1 else 0
                    high, total, acc = attend(
                        scores, vs.index(slot), kind, high, total, acc, scale, seen, SHAPE, TILE, PART != 1
                    )  # fmt: skip
                    key = begin + (i + NS) * UPDATE
                    if key < stop:
                        fetch(ks.index(slot), vs.index(slot), keys, page, key, span, block_stride, SHAPE, TILE)
                    async_copy.commit_group()
                    page = look_up(table, key + UPDATE, stop, SHAPE, TILE)
                    slot = gl.where(slot == NS - 1, 0, slot + 1)
                    # Only a window begins within a lane.
                    number = begin // UPDATE + i if SHAPE.WINDOW else i
                    if (number + 1) % (LANE // UPDATE) == 0:
                        if TILE.SHARED and num_splits > 1:
                            lane = (begin + i * UPDATE) // LANE - first // LANE
                            store_lane(partials, lane, high, total, acc, head, PAIRS, KV_HEADS * PROGRAMS, SHAPE, TILE)
                        else:
                            kept_high, kept_total, kept_acc = fold_lane(
                                (kept_high, kept_total, kept_acc), (high, total, acc)
                            )  # fmt: skip
                        high, total, acc = empty_lane(HEAD_DIM, TILE, mma)
        async_copy.wait_group(0)
        scores = score(ks.index(slot), query, SHAPE, TILE, mma)
        if SHAPE.WINDOW > 0 or QUERIES > 1:
            seen = limit - (begin + (num_steps - 1) * UPDATE)
        else:
            seen = stop - begin - (num_steps - 1) * UPDATE
        high, total, acc = attend(
            scores, vs.index(slot), kind, high, total, acc, scale, seen, SHAPE, TILE, True
        )  # fmt: skip
        to = out + (query_row.to(gl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + kv_head * (GROUP * HEAD_DIM))
        answers = to, v_scale, queries
        if TILE.SHARED and num_splits > 1:
            lane = (stop - 1) // LANE - first // LANE
            store_lane(partials, lane, high, total, acc, head, PAIRS, KV_HEADS * PROGRAMS, SHAPE, TILE)
            num_lanes = (context + LANE - 1) // LANE - first // LANE
            combine_at_last(partials, answers, head, num_splits, num_lanes, PAIRS, PROGRAMS, SHAPE, TILE)
        else:
            _, total, acc = fold_lane((kept_high, kept_total, kept_acc), (high, total, acc))
            store_sums(answers, total, acc, SHAPE, TILE)


@gluon_jit
def store_sums(answers, total, acc, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Write sums total [COLUMNS, 8] and acc [D, COLUMNS]; answers: where to, the scale of values, the queries."""
    to, v_scale, queries = answers
    layout: gl.constexpr = acc.type.layout
    total = gl.convert_layout(sum_of_classes(total, TILE.KW), gl.SliceLayout(0, layout))
    member = gl.arange(0, TILE.COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    column = gl.arange(0, SHAPE.HEAD_DIM, layout=gl.SliceLayout(1, layout))[:, None]
    answer = scaled(acc / total[None, :], v_scale, SHAPE)
    store_answers(to, answer, member, columns_of(column, SHAPE, TILE), queries, SHAPE)


@gluon_jit
def combine_at_last(
    partials, answers, head, num_splits, num_lanes,
    PAIRS: gl.constexpr, PROGRAMS: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Fold the lanes of some queries of a row, in the last of the programs that share it, and reset their counter."""
    to, v_scale, queries = answers
    gl.thread_barrier()
    counter = partials[3] + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    if gl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
        gl.store(counter, 0)
        total, acc = fold_lanes(partials, head, num_lanes, PAIRS, SHAPE.KV_HEADS * PROGRAMS, SHAPE.HEAD_DIM, TILE.KW)
        answer = scaled(acc / of_rows(sum_of_classes(total, TILE.KW), acc), v_scale, SHAPE)
        member, column = of_pairs(acc)
        store_answers(to, answer, member, column, queries, SHAPE)


def shape(group: int, pages: torch.Tensor, window: int = 0, queries: int = 1) -> PageShape:
    """Return the constants of layers with `group` query heads for a key head."""
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    return PageShape(kv_heads, group, head_dim, block_size, window, queries, 16 // pages.itemsize)


def takes(meta: AttentionMetadata, num_heads: int, head_dim: int) -> bool:
    """Return whether the kernel takes rows with as many queries as these may have."""
    most_pairs = MAX_LONE_PAIRS[head_dim] if meta.context_len.shape[0] == 1 else 0
    return meta.max_query_len <= MAX_QUERIES or meta.max_query_len * num_heads <= most_pairs


def queries_of_a_row(meta: AttentionMetadata, num_heads: int, head_dim: int) -> int:
    """Return QUERIES for these rows: a power of two, or 1 where some rows are the prompt kernel's."""
    return next_power_of_2(meta.max_query_len) if takes(meta, num_heads, head_dim) else 1


def launch(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    chain: DependentChain,
) -> None:
    """Attend in a dependent chain, for rows of at most MAX_QUERIES queries; q [M, Hq, D] behind them is left alone."""
    starts = chain.history_is_settled, has_dependent_launch(q.device)
    _launch(q, pages, layer, meta, out, chain.counters, starts)


def launch_short_rows(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    counters: torch.Tensor,
) -> None:
    """Fill the rows of out [T, Hq, D] that have one query, or all if none has more than MAX_QUERIES.

    counters: as in a DependentChain.
    """
    _launch(q, pages, layer, meta, out, counters, (False, False))


def _launch(
    q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor,
    counters: torch.Tensor, starts: tuple[bool, bool],
) -> None:  # fmt: skip
    """Launch the kernel; `starts`: EARLY and PDL."""
    kv_heads, head_dim, num_rows = pages.shape[3], pages.shape[5], meta.context_len.shape[0]
    of_device = limits_of(q.device)
    found = divided(
        shape(q.shape[1] // kv_heads, pages, meta.window, queries_of_a_row(meta, q.shape[1], head_dim)),
        num_rows,
        of_device,
    )
    programs, pairs = programs_and_pairs(found)
    programs *= kv_heads
    tile, splits = choose(num_rows * programs, found, meta.max_context_len, of_device)
    partials = None
    if tile.SHARED:
        sums = lanes_in_sight(meta.max_context_len, found, tile.LANE), num_rows, programs * pairs
        floats = partial(torch.empty, dtype=torch.float32, device=q.device)
        partials = floats((*sums, head_dim)), floats(sums), floats((*sums, CLASSES)), counters
    rows = None if meta.max_query_len == 1 else meta.query_start, meta.context_len, meta.block_tables
    scales = None if meta.kv_scales is None else meta.kv_scales[layer].scales
    layer_pages = pages[:, layer]
    numbers = meta.log2_scale, q.stride(0), layer_pages.stride(0), meta.block_tables.stride(0)
    options = {"launch_pdl": True} if starts[1] else {}
    decode_attention_kernel[(programs, num_rows, splits)](
        q, layer_pages, out, partials, rows, scales, *numbers, found, tile, *starts, num_warps=tile.KW, **options,
    )  # fmt: skip
