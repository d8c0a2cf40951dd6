"""Attention of several queries a row over a paged KV cache, in one Gluon kernel (sm_90).

    out[t] = softmax(scale · q[t] · K[f : p + 1]ᵀ) · V[f : p + 1],  p the position of token t in its row, in the order
    of `key_order.py`; f = max(0, p + 1 - window), or 0 without a window

Shapes: q [T, Hq, D] (tokens may be strided), pages [num_blocks, layers, 2, Hkv, block_size, D] contiguous,
AttentionMetadata of the rows -> the rows of several queries in out [T, Hq, D]. bf16 and fp16; D in AHEAD, block_size a
power of two from `hopper_ring.MIN_BLOCK_SIZE` on, at most CONSUMER_PAIRS query heads for a key head.
`torch_attention.py` is the reference.

One program takes a tile of (query, head of the group) pairs of one row and one key head. Its warps are specialised: one
fetches tiles of BN keys and values through the bulk copy engine into a ring of NS stages, CONSUMERS groups of four
warps each take the queries of up to 64 pairs against every stage. While one group computes its softmax another has the
tensor cores. A tile is one update of the key order, and the sums of the lanes before the current one lie in shared
memory: registers have no room for them. With a window a program begins at the tile of the first key that its first
query sees.

A pair's sums run over the same keys in the same order wherever it lies, so its result is the same, bit for bit, in any
batch, and the one that `gluon_decode.py` computes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.decode_ring import PageShape
from photon_grpc.kernels.attention.find_tile import find_tile
from photon_grpc.kernels.attention.gluon_decode import shape
from photon_grpc.kernels.attention.hopper_ring import descriptor, page_layout, produce
from photon_grpc.kernels.attention.hopper_steps import attend_all, num_parts
from photon_grpc.kernels.attention.key_order import ORDERS
from photon_grpc.kernels.attention.lane_sums import of_rows, sum_of_classes
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.lang.gluon import fence_async_shared, gl, gluon_jit, mbarrier
from photon_grpc.kernels.lang.jit import once

#: Pairs of one consumer: the rows of one wgmma.
CONSUMER_PAIRS = 64
# (head_dim, consumers) -> tiles under way. The sums of three consumers of D 128, or of two of D 256, have no room in
# shared memory.
STAGES = {(64, 2): 3, (64, 3): 3, (128, 2): 3, (256, 1): 2}
# head_dim -> whether scores are computed a tile ahead.
AHEAD = {64: False, 128: True, 256: True}
# (head_dim, consumers) -> registers of a consumer's and of the producer's threads, together all of a multiprocessor's.
# The producer clears the tail of a tile of values, which takes more of them where a value is wider.
REGISTERS = {(64, 2): (240, 24), (64, 3): (160, 32), (128, 2): (232, 40), (256, 1): (240, 120)}


class PrefillTile(NamedTuple):
    """Constants that the kernel is compiled for.

    CONSUMERS groups of warps with PAIRS pairs each, BN keys a step, LANE keys a lane, NS steps in flight, whether
    scores are computed AHEAD of sums.
    """

    CONSUMERS: int
    PAIRS: int
    BN: int
    LANE: int
    NS: int
    AHEAD: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


@gluon_jit
def consume(queries, ring, tile, GROUP_OF_WARPS: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Attend for the queries of one group of four warps. queries: source, shared copy, results, sums of lanes."""
    q, qs, out, kept = queries
    first_query, first, count, before, kv_head, q_stride, scale, tiles = tile
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    GROUP: gl.constexpr = SHAPE.GROUP
    BN: gl.constexpr = TILE.BN
    PAIRS: gl.constexpr = qs.shape[1]
    D: gl.constexpr = qs.shape[2]
    QUERIES: gl.constexpr = PAIRS // GROUP
    LANES: gl.constexpr = D // 8
    PARTS: gl.constexpr = num_parts(D)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    own_first = first + GROUP_OF_WARPS * QUERIES
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, copy))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    token = own_first + pair // GROUP
    inside = ((token < count) & (pair < QUERIES * GROUP))[:, None] & (column >= 0)[None, :]
    query = (first_query + token).to(gl.int64)
    within = (kv_head * GROUP + pair % GROUP)[:, None] * D + column[None, :]
    own_queries = qs.index(GROUP_OF_WARPS)
    own_queries.store(gl.load(q + query[:, None] * q_stride + within, mask=inside, other=0.0))
    fence_async_shared()
    member = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, score_mma))
    own = ()
    for i in gl.static_range(PARTS):
        own = own + (kept.index(GROUP_OF_WARPS * PARTS + i),)
    total = attend_all(
        own_queries, ring, own, scale, before + own_first + member // GROUP, tiles, SHAPE.WINDOW, TILE, out_mma,
        score_mma,
    )  # fmt: skip
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * PARTS // LANES, LANES // PARTS], [4, 1], [1, 0])
    total = sum_of_classes(total, 4)
    for i in gl.static_range(PARTS):
        sums = own[i].load(wide)
        answer = (sums / of_rows(total, sums)).to(qs.dtype)
        pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, wide))
        column = gl.arange(0, D // PARTS, layout=gl.SliceLayout(0, wide)) + i * (D // PARTS)
        token = own_first + pair // GROUP
        inside = ((token < count) & (pair < QUERIES * GROUP))[:, None] & (column >= 0)[None, :]
        query = (first_query + token).to(gl.int64)
        within = (kv_head * GROUP + pair % GROUP)[:, None] * D + column[None, :]
        gl.store(out + query[:, None] * (KV_HEADS * GROUP * D) + within, answer, mask=inside)


@gluon_jit
def varlen_tile_kernel(
    q, cache, out, rows, num_rows, scale, q_stride, table_stride, places, SHAPE: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Attend for tile t of row b in program query_start[b] // QUERIES + b + t from the end; four warps.

    The grid is (KV_HEADS, tiles).

    rows: query_start, context_len, block_tables. places: rows of the descriptor up to the layer's first key, from a key
    to its value, and from page to page.
    """
    query_start, context_len, block_tables = rows
    first_row, v_rows, page_rows = places
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    CONSUMERS: gl.constexpr = TILE.CONSUMERS
    PAIRS: gl.constexpr = TILE.PAIRS
    BN: gl.constexpr = TILE.BN
    NS: gl.constexpr = TILE.NS
    QUERIES: gl.constexpr = CONSUMERS * (PAIRS // SHAPE.GROUP)
    kind: gl.constexpr = q.dtype.element_ty
    kv_head = gl.program_id(0)
    # From the last tile to the first: the last tiles of a prompt see the most keys and should not be begun last.
    program = gl.num_programs(1) - 1 - gl.program_id(1)
    row, first_query, count, first = find_tile(query_start, num_rows, program, QUERIES)
    if (count == 1) | (first >= count):
        return
    context = gl.load(context_len + row)
    before = context - count
    steps = (before + gl.minimum(first + QUERIES, count) + BN - 1) // BN
    full = (before + first + 1) // BN
    begin, clear, first_key = 0, 0, 0
    if SHAPE.WINDOW:
        first_key = gl.maximum(before + first + 1 - SHAPE.WINDOW, 0)
        begin = first_key // BN
        # The tile from which the last query sees all keys.
        clear = (gl.maximum(before + gl.minimum(first + QUERIES, count) - SHAPE.WINDOW, 0) + BN - 1) // BN
        clear = gl.minimum(clear, steps)
        full = gl.maximum(full, clear)
    layout: gl.constexpr = page_layout()
    ks = gl.allocate_shared_memory(kind, [NS, BN, HEAD_DIM], layout)
    vs = gl.allocate_shared_memory(kind, [NS, BN, HEAD_DIM], layout)
    qs = gl.allocate_shared_memory(kind, [CONSUMERS, PAIRS, HEAD_DIM], layout)
    # Columns that one warp reads or writes together lie in different banks.
    apart: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    PARTS: gl.constexpr = num_parts(HEAD_DIM)
    kept = gl.allocate_shared_memory(gl.float32, [CONSUMERS * PARTS, PAIRS, HEAD_DIM // PARTS], apart)
    k_ready = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NS):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    mbarrier.init(landed, count=1)
    fence_async_shared()
    table = block_tables + row.to(gl.int64) * table_stride
    k_row = first_row + kv_head * BLOCK_SIZE
    ring = (ks, vs, k_ready, v_ready, k_free, v_free)
    tile = (first_query, first, count, before, kv_head, q_stride, scale, (begin, clear, full, steps))
    pages = (table, k_row, v_rows, page_rows, begin, steps, first_key, context)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, ((q, qs, out, kept), ring, tile, 0, SHAPE, TILE)),
                (produce, (cache, landed, ring, pages, SHAPE)),
            ],
            [1],
            [TILE.PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, ((q, qs, out, kept), ring, tile, 0, SHAPE, TILE)),
                (consume, ((q, qs, out, kept), ring, tile, 1, SHAPE, TILE)),
                (produce, (cache, landed, ring, pages, SHAPE)),
            ],
            [4, 1],
            [TILE.CONSUMER_REGISTERS, TILE.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, ((q, qs, out, kept), ring, tile, 0, SHAPE, TILE)),
                (consume, ((q, qs, out, kept), ring, tile, 1, SHAPE, TILE)),
                (consume, ((q, qs, out, kept), ring, tile, 2, SHAPE, TILE)),
                (produce, (cache, landed, ring, pages, SHAPE)),
            ],
            [4, 4, 1],
            [TILE.CONSUMER_REGISTERS, TILE.CONSUMER_REGISTERS, TILE.PRODUCER_REGISTERS],
        )


def num_consumers(num_pairs: int, head_dim: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the groups of warps per tile of keys: three if `num_pairs` pairs have tiles for two waves, else two.

    Wide heads have room for one.
    """
    if (head_dim, 1) in STAGES:
        return 1
    tiles = num_pairs // (3 * CONSUMER_PAIRS) * kv_heads
    return 3 if tiles >= 2 * multiprocessors and (head_dim, 3) in STAGES else 2


def tile(head_dim: int, consumers: int, window: int = 0) -> PrefillTile:
    """Return the constants for this many groups of warps."""
    sizes = head_dim, consumers
    own, producers = REGISTERS[sizes]
    if window and consumers == 2:
        # Pages before the window take more registers to look up.
        own, producers = own - 8, producers + 16
    return PrefillTile(consumers, CONSUMER_PAIRS, *ORDERS[head_dim], STAGES[sizes], AHEAD[head_dim], own, producers)


def launch(
    q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor, *, consumers: int
) -> None:
    """Fill the rows of out [T, Hq, D] that have several queries, from q [T, Hq, D] (tokens may be strided)."""
    _, layers, _, kv_heads, block_size, head_dim = pages.shape
    group, found = q.shape[1] // kv_heads, tile(head_dim, consumers, meta.window)
    num_rows, plane_rows = meta.context_len.shape[0], kv_heads * block_size
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = num_rows, meta.log2_scale, q.stride(0), meta.block_tables.stride(0)
    places = layer * 2 * plane_rows, plane_rows, layers * 2 * plane_rows
    grid = kv_heads, q.shape[0] // (consumers * (CONSUMER_PAIRS // group)) + num_rows
    varlen_tile_kernel[grid](
        q,
        descriptor(pages, min(block_size, found.BN)),
        out,
        rows,
        *numbers,
        places,
        shape(group, pages, meta.window),
        found,
        num_warps=4,
    )


@once
def preload(device: torch.device, dtype: torch.dtype, found: PageShape) -> None:
    """Compile and load the kernel for every number of consumers; strides are multiples of 16, as in every launch."""
    kv_heads, group, head_dim, block_size, window, *_ = found
    q, out = torch.zeros((2, 2, group * kv_heads, head_dim), dtype=dtype, device=device)
    pages = torch.zeros((1, 1, 2, kv_heads, block_size, head_dim), dtype=dtype, device=device)
    context_len = torch.full((1,), 2, dtype=torch.int32, device=device)
    query_start = torch.nn.functional.pad(context_len, (1, 0))
    block_tables = torch.zeros((1, 1), dtype=torch.int32, device=device)
    meta = AttentionMetadata(query_start, context_len, block_tables, 1.0, 2, 2, window=window)
    for consumers in (number for of, number in STAGES if of == head_dim):
        launch(q, pages, 0, meta, out, consumers=consumers)
