"""Attention of one query a row over a paged KV cache, in plain Triton: any dtype, any head_dim, any block size.

    out[b] = softmax(scale · q[b] · K[first : context_len[b]]ᵀ) · V[first : context_len[b]],
    first = 0, or max(0, context_len[b] - window) where there is a window

The query group of a key head is folded into the rows of the matrix product. Programs share a row by whole lanes of keys
(`key_order.py`), whose sums `merge_kernel` folds in order, so how many programs share it changes no bit. Softmax and
sums in float32; `torch_attention.py` is the reference.

Shapes: q [T, Hq, D] (tokens may be strided), pages [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata of
the rows -> the rows of one query in out [T, Hq, D].
Bytes moved: 2 · Hkv · D · itemsize for every key of every row.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.key_order import num_lanes
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.online_softmax import attend, empty_lane, fold, key_offsets, scale_of, shape
from photon_grpc.kernels.lang.jit import jit, next_power_of_2, tl
from photon_grpc.kernels.lang.page_scales import of_layer


class DecodeRows(NamedTuple):
    """Constants that `decode_kernel` is compiled for: BLOCK_M is GROUP padded. SHARED: programs may share a row."""

    BLOCK_M: int
    SHARED: bool


@jit
def decode_kernel(
    q, pages, out, partials, rows, scales, scale, q_stride, block_stride, table_stride,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute some lanes of the keys of one (row, key head) per program; skip rows of several queries.

    rows: query_start, context_len, block_tables. scales: PageScales, or None. Writes out [T, Hq, D] unless rows are
    SHARED, else `partials`: of every lane, counted from the first in sight, acc [lanes, B, Hq, D], high [lanes, B, Hq]
    and total [lanes, B, Hq].
    """
    query_start, context_len, block_tables = rows
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    HEAD_PAD: tl.constexpr = SHAPE.HEAD_PAD
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    BLOCK_N: tl.constexpr = SHAPE.UPDATE
    LANE: tl.constexpr = SHAPE.LANE
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = tl.load(query_start + row)
    if tl.load(query_start + row + 1) - query != 1:
        return
    context = tl.load(context_len + row)
    first_key, first_lane = keys_in_sight(context, SHAPE)
    length = tl.cdiv(tl.cdiv(context, LANE) - first_lane, tl.num_programs(2)) * LANE
    begin = first_lane * LANE + split * length

    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PAD)
    inside = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUP + member
    within = head[:, None] * HEAD_DIM + column[None, :]
    tile = tl.load(q + query.to(tl.int64) * q_stride + within, mask=inside, other=0.0)
    scale = scale_of(scales, scale, 0, kv_head, SHAPE)
    keys = pages + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    table = block_tables + row.to(tl.int64) * table_stride

    kept_high, kept_total, kept_acc = empty_lane(BLOCK_M, HEAD_PAD)
    for lane in range(begin, tl.minimum(begin + length, context), LANE):
        high, total, acc = empty_lane(BLOCK_M, HEAD_PAD)
        stop = tl.minimum(lane + LANE, context)
        for start in range(tl.maximum(lane, first_key // BLOCK_N * BLOCK_N), stop, BLOCK_N):
            offsets = key_offsets(table, start, stop, block_stride, SHAPE, BLOCK_N)
            key = start + tl.arange(0, BLOCK_N)
            in_context = (key < stop) & (key >= first_key)
            high, total, acc = attend(
                tile, keys, values, offsets, in_context, in_context[None, :], high, total, acc, scale, SHAPE, True
            )  # fmt: skip
        if TILE.SHARED:
            sums, highs, totals = partials
            place = (lane // LANE - first_lane).to(tl.int64) * tl.num_programs(0) + row
            place = place * (KV_HEADS * GROUP) + head
            tl.store(sums + place[:, None] * HEAD_DIM + column[None, :], acc, mask=inside)
            tl.store(highs + place, high, mask=member < GROUP)
            tl.store(totals + place, total, mask=member < GROUP)
        else:
            kept_high, kept_total, kept_acc = fold(kept_high, kept_total, kept_acc, high, total, acc)
    if not TILE.SHARED:
        answer = kept_acc / tl.where(kept_total == 0.0, 1.0, kept_total)[:, None]
        answer = answer * scale_of(scales, 1.0, 1, kv_head, SHAPE)
        to = out + query.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + within
        tl.store(to, answer.to(tile.dtype), mask=inside)


@jit
def keys_in_sight(context, SHAPE: tl.constexpr):
    """Return the first key that the last of `context` tokens sees, and its lane."""
    first_key = 0
    if SHAPE.WINDOW:
        first_key = tl.maximum(context - SHAPE.WINDOW, 0)
    return first_key, first_key // SHAPE.LANE


@jit
def merge_kernel(partials, out, query_start, context_len, scales, SHAPE: tl.constexpr):
    """Write out for one (row, query head) from the sums of its lanes, in their order."""
    sums, highs, totals = partials
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    HEAD_PAD: tl.constexpr = SHAPE.HEAD_PAD
    row, head = tl.program_id(0), tl.program_id(1)
    query = tl.load(query_start + row)
    if tl.load(query_start + row + 1) - query != 1:
        return
    context = tl.load(context_len + row)
    _, first_lane = keys_in_sight(context, SHAPE)
    column = tl.arange(0, HEAD_PAD)[None, :]
    one = tl.arange(0, 1)
    high, total, acc = empty_lane(1, HEAD_PAD)
    for lane in range(tl.cdiv(context, SHAPE.LANE) - first_lane):
        place = (lane * tl.num_programs(0) + row).to(tl.int64) * tl.num_programs(1) + head + one
        lane_acc = tl.load(sums + place[:, None] * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)
        high, total, acc = fold(high, total, acc, tl.load(highs + place), tl.load(totals + place), lane_acc)
    answer = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    answer = answer * scale_of(scales, 1.0, 1, head // SHAPE.GROUP, SHAPE)
    to = out + (query.to(tl.int64) * tl.num_programs(1) + head) * HEAD_DIM + column
    tl.store(to, answer.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def options(pages: torch.Tensor, dtype: torch.dtype) -> dict[str, int]:
    """Return the warps and stages of `decode_kernel` for queries of this dtype."""
    if dtype == torch.float32:
        # Without tensor cores the tiles of a float32 product live in registers: other numbers of warps spill them.
        return {"num_warps": 4 if 64 < pages.shape[5] <= 128 else 8, "num_stages": 2}
    return {"num_warps": 2 if pages.shape[5] <= 64 else 4, "num_stages": 3}


def tile(group: int, splits: int) -> DecodeRows:
    """Return the constants for `group` query heads of a key head."""
    return DecodeRows(max(16, next_power_of_2(group)), splits > 1)


def lanes_in_sight(max_keys: int, window: int, lane: int) -> int:
    """Return the most lanes that a query sees: of a window one more than it fills."""
    lanes = num_lanes(max_keys, lane)
    return min(lanes, num_lanes(window, lane) + 1) if window else lanes


def num_splits(num_pairs: int, lanes: int, multiprocessors: int) -> int:
    """Return the programs of each of `num_pairs` (row, key head) pairs of so many lanes, to fill the device.

    At most four programs for each multiprocessor: with more, the merge costs what the splits gain (measured on an H200
    at 1 to 256 rows of 272 to 4,096 keys).
    """
    return max(1, min(lanes, 4 * multiprocessors // num_pairs))


def launch(
    q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor, *, splits: int
) -> None:
    """Fill the rows of `out` that have one query."""
    num_rows, q_heads, found = meta.context_len.shape[0], q.shape[1], shape(q.shape[1], pages, meta.window, q.dtype)
    scales = of_layer(meta.kv_scales, layer)
    partials = None
    if splits > 1:
        sums = lanes_in_sight(meta.max_context_len, meta.window, found.LANE), num_rows, q_heads
        floats = partial(torch.empty, dtype=torch.float32, device=q.device)
        partials = floats((*sums, found.HEAD_DIM)), floats(sums), floats(sums)
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = meta.log2_scale, q.stride(0), pages.stride(0), meta.block_tables.stride(0)
    decode_kernel[(num_rows, found.KV_HEADS, splits)](
        q, pages[:, layer], out, partials, rows, scales, *numbers, found, tile(found.GROUP, splits),
        **options(pages, q.dtype),
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(num_rows, q_heads)](partials, out, meta.query_start, meta.context_len, scales, found, num_warps=1)
