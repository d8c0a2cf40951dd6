"""Attention of several queries a row over a paged KV cache, in plain Triton: any dtype, any head_dim, any block size.

    out[t] = softmax(scale · q[t] · K[first : p + 1]ᵀ) · V[first : p + 1],  p the position of token t in its row,
    first = 0, or max(0, p - window + 1) where there is a window

One program takes a tile of (query, head of the group) pairs and one key head. Softmax and sums in float32;
`torch_attention.py` is the reference.

Shapes: q [T, Hq, D] (tokens may be strided), pages [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata of
the rows -> the rows of several queries in out [T, Hq, D]. All new keys are in the pages before any row attends. Bytes
moved: 2 · Hkv · D · itemsize for every key of every row, once for each tile of queries; and q and out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.find_tile import find_tile
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.online_softmax import attend, empty_lane, fold, key_offsets, scale_of, shape
from photon_grpc.kernels.lang.jit import jit, next_power_of_2, tl
from photon_grpc.kernels.lang.page_scales import of_layer


class VarlenTile(NamedTuple):
    """Constants that the kernel is compiled for: BLOCK_M (query, head of the group) pairs."""

    BLOCK_M: int


@jit
def varlen_kernel(
    q, pages, out, rows, scales, num_rows, scale, q_stride, block_stride, table_stride,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attend for BLOCK_M // GROUP queries of a row and one key head per program; rows, scales: see `decode_kernel`."""
    query_start, context_len, block_tables = rows
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    HEAD_PAD: tl.constexpr = SHAPE.HEAD_PAD
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    WINDOW: tl.constexpr = SHAPE.WINDOW
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = SHAPE.UPDATE
    LANE: tl.constexpr = SHAPE.LANE
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    # From the last tile to the first: the last tiles of a prompt see the most keys and should not be begun last.
    program, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, first_query, count, first = find_tile(query_start, num_rows, program, QUERIES)
    if (count == 1) | (first >= count):
        return
    before = tl.load(context_len + row) - count

    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PAD)
    token = first + member // GROUP
    valid = (token < count) & (member < QUERIES * GROUP)
    inside = valid[:, None] & (column < HEAD_DIM)[None, :]
    query = (first_query + token).to(tl.int64)
    within = (kv_head * GROUP + member % GROUP)[:, None] * HEAD_DIM + column[None, :]
    tile = tl.load(q + query[:, None] * q_stride + within, mask=inside, other=0.0)
    scale = scale_of(scales, scale, 0, kv_head, SHAPE)
    keys = pages + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    table = block_tables + row.to(tl.int64) * table_stride

    stop = before + tl.minimum(first + QUERIES, count)
    begin, masked_from = 0, (before + first + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        begin = tl.maximum(before + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        masked_from = begin
    kept_high, kept_total, kept_acc = empty_lane(BLOCK_M, HEAD_PAD)
    for lane in range(begin // LANE * LANE, stop, LANE):
        high, total, acc = empty_lane(BLOCK_M, HEAD_PAD)
        lane_stop = tl.minimum(lane + LANE, stop)
        if not WINDOW:
            for start in range(lane, tl.minimum(lane_stop, masked_from), BLOCK_N):
                offsets = key_offsets(table, start, stop, block_stride, SHAPE, BLOCK_N)
                high, total, acc = attend(
                    tile, keys, values, offsets, None, None, high, total, acc, scale, SHAPE, False
                )  # fmt: skip
        for start in range(tl.maximum(lane, masked_from), lane_stop, BLOCK_N):
            offsets = key_offsets(table, start, stop, block_stride, SHAPE, BLOCK_N)
            key = start + tl.arange(0, BLOCK_N)
            visible = (key[None, :] <= (before + token)[:, None]) & (key < stop)[None, :]
            in_context = key < stop
            if WINDOW:
                in_context &= key > before + first - WINDOW
                visible &= key[None, :] > (before + token - WINDOW)[:, None]
            high, total, acc = attend(
                tile, keys, values, offsets, in_context, visible, high, total, acc, scale, SHAPE, True
            )  # fmt: skip
        kept_high, kept_total, kept_acc = fold(kept_high, kept_total, kept_acc, high, total, acc)
    answer = kept_acc / tl.where(kept_total == 0.0, 1.0, kept_total)[:, None]
    answer = answer * scale_of(scales, 1.0, 1, kv_head, SHAPE)
    tl.store(out + query[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + within, answer.to(tile.dtype), mask=inside)


def options(pages: torch.Tensor, dtype: torch.dtype) -> dict[str, int]:
    """Return the warps and stages of `varlen_kernel` for queries of this dtype."""
    if dtype == torch.float32:
        return {"num_warps": 8, "num_stages": 2}
    return {"num_warps": 4 if pages.shape[5] <= 64 else 8, "num_stages": 3}


def tile(group: int, dtype: torch.dtype) -> VarlenTile:
    """Return the constants for `group` query heads of a key head, in this dtype.

    The best of a sweep on an H200 over 64 to 256 queries, 4 and 8 warps, 2 to 4 stages, for prompts of 512 and 2,048
    tokens.
    """
    # Without tensor cores the tiles of a float32 product live in registers: wider ones spill them.
    return VarlenTile(max(32 if dtype == torch.float32 else 64, next_power_of_2(group)))


def launch(q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor) -> None:
    """Fill the rows of `out` that have several queries."""
    num_rows, found = meta.context_len.shape[0], shape(q.shape[1], pages, meta.window, q.dtype)
    cut, scales = tile(found.GROUP, q.dtype), of_layer(meta.kv_scales, layer)
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = num_rows, meta.log2_scale, q.stride(0), pages.stride(0), meta.block_tables.stride(0)
    grid = (q.shape[0] // (cut.BLOCK_M // found.GROUP) + num_rows, found.KV_HEADS)
    varlen_kernel[grid](q, pages[:, layer], out, rows, scales, *numbers, found, cut, **options(pages, q.dtype))
