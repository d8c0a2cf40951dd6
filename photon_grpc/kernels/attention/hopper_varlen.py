"""Attention of several queries a row over a paged KV cache, in one Gluon kernel (sm_90).

    out[t] = softmax(scale · q[t] · K[f : p + 1]ᵀ) · V[f : p + 1],  p the position of token t in its row, in the order
    of `key_order.py`; f = max(0, p + 1 - window), or 0 without a window

Shapes: q [T, Hq, D] (tokens may be strided), pages [num_blocks, layers, 2, Hkv, block_size, D] contiguous,
AttentionMetadata of the rows -> the rows of several queries in out [T, Hq, D]. bf16 and fp16; D in HEAD_DIMS,
block_size a power of two from `hopper_ring.MIN_BLOCK_SIZE` on, at most CONSUMER_PAIRS query heads for a key head.
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

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.attention.decode_ring import PageShape, scaled
from photon_grpc.kernels.attention.find_tile import find_tile
from photon_grpc.kernels.attention.gluon_decode import shape
from photon_grpc.kernels.attention.hopper_ring import descriptor, page_layout, produce
from photon_grpc.kernels.attention.hopper_ring8 import produce8
from photon_grpc.kernels.attention.hopper_steps import attend_all, num_parts, parts_of
from photon_grpc.kernels.attention.key_order import ORDERS
from photon_grpc.kernels.attention.lane_sums import fold, of_rows, sum_of_classes
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.products_of_8_bits import product_type, rounded_query
from photon_grpc.kernels.lang.gluon import fence_async_shared, gl, gluon_jit, mbarrier
from photon_grpc.kernels.lang.jit import once
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE, PageScales

#: Pairs of one consumer: the rows of one wgmma.
CONSUMER_PAIRS = 64
# (head_dim, consumers) -> tiles under way. Beside the sums of three consumers of D 128 shared memory has room for two
# tiles, and those of two of D 256 have none.
STAGES = {(64, 2): 3, (64, 3): 3, (128, 2): 3, (128, 3): 2, (256, 1): 2}
# The same -> whether scores are computed a tile ahead: three consumers have no registers for it, and need it less.
AHEAD = {(64, 2): False, (64, 3): False, (128, 2): True, (128, 3): False, (256, 1): True}
HEAD_DIMS = frozenset(head_dim for head_dim, _ in STAGES)
# (head_dim, consumers) -> registers of a consumer's and of the producer's threads, together all of a multiprocessor's.
# The producer clears the tail of a tile of values, which takes more of them where a value is wider.
REGISTERS = {(64, 2): (240, 24), (64, 3): (160, 32), (128, 2): (232, 40), (128, 3): (160, 24), (256, 1): (240, 120)}


#: The same where four warps turn 8 bits into 16, with a tile of keys and values in registers.
REGISTERS_OF_8_BITS = {(64, 2): (208, 88), (128, 2): (200, 104), (256, 1): (240, 200)}


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
    first_query, first, count, before, kv_head, q_stride, scale, v_scale, tiles = tile
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
    found = gl.load(q + query[:, None] * q_stride + within, mask=inside, other=0.0)
    own_queries.store(rounded_query(found, qs.dtype))
    fence_async_shared()
    member = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, score_mma))
    own = ()
    for i in gl.static_range(PARTS):
        own = own + (kept.index(GROUP_OF_WARPS * PARTS + i),)
    acc, total, kept_factor, lane_factor = attend_all(
        own_queries, ring, own, scale, before + own_first + member // GROUP, tiles, SHAPE.WINDOW, TILE, out_mma,
        score_mma,
    )  # fmt: skip
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * PARTS // LANES, LANES // PARTS], [4, 1], [1, 0])
    # Answers lie in their order in the memory of the queries, which are no longer needed.
    apart: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    kind: gl.constexpr = out.dtype.element_ty
    answers = own_queries._reinterpret(kind, [PARTS, PAIRS, D // PARTS], apart)
    total = sum_of_classes(total, 4)
    parts = parts_of(acc)
    for i in gl.static_range(PARTS):
        part = parts[i]
        sums = fold(own[i].load(part.type.layout), part, of_rows(kept_factor, part), of_rows(lane_factor, part))
        answers.index(i).store(scaled(sums / of_rows(total, sums), v_scale, SHAPE).to(kind))
        pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, wide))
        column = gl.arange(0, D // PARTS, layout=gl.SliceLayout(0, wide)) + i * (D // PARTS)
        token = own_first + pair // GROUP
        inside = ((token < count) & (pair < QUERIES * GROUP))[:, None] & (column >= 0)[None, :]
        query = (first_query + token).to(gl.int64)
        within = (kv_head * GROUP + pair % GROUP)[:, None] * D + column[None, :]
        gl.store(out + query[:, None] * (KV_HEADS * GROUP * D) + within, answers.index(i).load(wide), mask=inside)


@gluon_jit
def fill(cache, landed, ring, pages, SHAPE: gl.constexpr):
    """Fetch tiles of keys and values into the ring, by one warp or by four."""
    if SHAPE.CHUNK == 8:
        produce(cache, landed, ring, pages, SHAPE)
    else:
        produce8(cache, ring, pages, SHAPE)


@gluon_jit
def varlen_tile_kernel(
    q, cache, out, rows, num_rows, scales, scale, q_stride, table_stride, places,
    SHAPE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Attend for tile t of row b in program query_start[b] // QUERIES + b + t from the end; four warps.

    The grid is (KV_HEADS, tiles).

    rows: query_start, context_len, block_tables. cache: a descriptor, or words of pages of 8 bits with `scales`,
    float32 [2, KV_HEADS] of keys and of values. places: rows of the descriptor, or words, up to the layer's first key,
    from a key to its value, and from page to page.
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
    kind: gl.constexpr = product_type(q.dtype.element_ty, SHAPE.CHUNK)
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
    # Only where it is waited for: the compiler gives memory that is no longer used to sums that warps exchange, and a
    # barrier's may hold nothing else before the barrier is invalidated. Rows of sums were lost where it did.
    landed = k_ready
    if SHAPE.CHUNK == 8:
        landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(landed, count=1)
    for stage in gl.static_range(NS):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    fence_async_shared()
    table = block_tables + row.to(gl.int64) * table_stride
    k_row = first_row + kv_head * BLOCK_SIZE
    if SHAPE.CHUNK == 16:
        k_row = kv_head * (BLOCK_SIZE * HEAD_DIM // 4)
    v_scale = 1.0
    if scales is not None:
        scale = scale * gl.load(scales + kv_head)
        v_scale = gl.load(scales + SHAPE.KV_HEADS + kv_head)
    ring = (ks, vs, k_ready, v_ready, k_free, v_free)
    tile = (first_query, first, count, before, kv_head, q_stride, scale, v_scale, (begin, clear, full, steps))
    pages = (table, k_row, v_rows, page_rows, begin, steps, first_key, context)
    WARPS: gl.constexpr = 1 if SHAPE.CHUNK == 8 else 4
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consume, ((q, qs, out, kept), ring, tile, 0, SHAPE, TILE)), (fill, (cache, landed, ring, pages, SHAPE))],
            [WARPS],
            [TILE.PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, ((q, qs, out, kept), ring, tile, 0, SHAPE, TILE)),
                (consume, ((q, qs, out, kept), ring, tile, 1, SHAPE, TILE)),
                (fill, (cache, landed, ring, pages, SHAPE)),
            ],
            [4, WARPS],
            [TILE.CONSUMER_REGISTERS, TILE.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, ((q, qs, out, kept), ring, tile, 0, SHAPE, TILE)),
                (consume, ((q, qs, out, kept), ring, tile, 1, SHAPE, TILE)),
                (consume, ((q, qs, out, kept), ring, tile, 2, SHAPE, TILE)),
                (fill, (cache, landed, ring, pages, SHAPE)),
            ],
            [4, 4, WARPS],
            [TILE.CONSUMER_REGISTERS, TILE.CONSUMER_REGISTERS, TILE.PRODUCER_REGISTERS],
        )


def numbers_of_consumers(shape: PageShape) -> list[int]:
    """Return how many groups of warps a tile of keys may have."""
    sizes = REGISTERS if shape.CHUNK == 8 else REGISTERS_OF_8_BITS
    most = 3 if shape.HEAD_DIM == 64 or _is_plain(shape) else 2
    return [consumers for head_dim, consumers in sizes if head_dim == shape.HEAD_DIM and consumers <= most]


def _is_plain(shape: PageShape) -> bool:
    """Return whether three consumers of heads of 128 have registers: no window, whole tiles of pairs and of keys."""
    has_whole_tiles = CONSUMER_PAIRS % shape.GROUP == 0 and shape.BLOCK_SIZE >= ORDERS[shape.HEAD_DIM].UPDATE
    return has_whole_tiles and not shape.WINDOW


def num_consumers(num_pairs: int, shape: PageShape, multiprocessors: int) -> int:
    """Return the groups of warps per tile of keys: the most if `num_pairs` pairs have tiles for two waves."""
    fewest, *_, most = numbers_of_consumers(shape) * 2
    tiles = num_pairs // (most * CONSUMER_PAIRS) * shape.KV_HEADS
    return most if tiles >= 2 * multiprocessors else fewest


def tile(shape: PageShape, consumers: int) -> PrefillTile:
    """Return the constants for this many groups of warps."""
    sizes = shape.HEAD_DIM, consumers
    own, producers = REGISTERS[sizes]
    if shape.CHUNK == 16:
        own, producers = REGISTERS_OF_8_BITS[sizes]
    elif shape.WINDOW and consumers == 2:
        # Pages before the window take more registers to look up.
        own, producers = own - 8, producers + 16
    order = ORDERS[shape.HEAD_DIM]
    return PrefillTile(consumers, CONSUMER_PAIRS, *order, STAGES[sizes], AHEAD[sizes], own, producers)


def launch(
    q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor, *, consumers: int
) -> None:
    """Fill the rows of out [T, Hq, D] that have several queries, from q [T, Hq, D] (tokens may be strided)."""
    of_pages = shape(q.shape[1] // pages.shape[3], pages, meta.window)
    found, num_rows = tile(of_pages, consumers), meta.context_len.shape[0]
    cache, places = _cache(pages, layer, found.BN)
    rows = meta.query_start, meta.context_len, meta.block_tables
    scales = None if meta.kv_scales is None else meta.kv_scales[layer].scales
    numbers = num_rows, scales, meta.log2_scale, q.stride(0), meta.block_tables.stride(0)
    grid = of_pages.KV_HEADS, q.shape[0] // (consumers * (CONSUMER_PAIRS // of_pages.GROUP)) + num_rows
    varlen_tile_kernel[grid](q, cache, out, rows, *numbers, places, of_pages, found, num_warps=4)


def _cache(pages: torch.Tensor, layer: int, keys: int) -> tuple[Any, tuple[int, int, int]]:
    """Return the kernel's `cache` for tiles of so many keys, and its `places`."""
    _, layers, _, kv_heads, block_size, head_dim = pages.shape
    plane = kv_heads * block_size
    if pages.itemsize == 1:
        words = pages.view(torch.int32)[:, layer]
        return words, (0, plane * head_dim // 4, words.stride(0))
    return descriptor(pages, min(block_size, keys)), (layer * 2 * plane, plane, layers * 2 * plane)


@once
def preload(device: torch.device, dtype: torch.dtype, found: PageShape) -> None:
    """Compile and load the kernel for every number of consumers; strides are multiples of 16, as in every launch."""
    kv_heads, group, head_dim, block_size, window, *_ = found
    q, out = torch.zeros((2, 2, group * kv_heads, head_dim), dtype=dtype, device=device)
    of_pages = dtype if found.CHUNK == 8 else PAGE_DTYPE
    pages = torch.zeros((1, 1, 2, kv_heads, block_size, head_dim), dtype=of_pages, device=device)
    context_len = torch.full((1,), 2, dtype=torch.int32, device=device)
    query_start = torch.nn.functional.pad(context_len, (1, 0))
    block_tables = torch.zeros((1, 1), dtype=torch.int32, device=device)
    scales = (
        None if found.CHUNK == 8 else (PageScales.ones(kv_heads, torch.zeros(1, dtype=torch.int64, device=device)),)
    )
    meta = AttentionMetadata(query_start, context_len, block_tables, 1.0, 2, 2, window=window, kv_scales=scales)
    for consumers in numbers_of_consumers(found):
        launch(q, pages, 0, meta, out, consumers=consumers)
