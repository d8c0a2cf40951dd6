"""Attention of one query a row over a paged KV cache, in plain Triton: any dtype, any head_dim, any block size.

    out[b] = softmax(scale · q[b] · K[first : context_len[b]]ᵀ) · V[first : context_len[b]],
    first = 0, or max(0, context_len[b] - window) where there is a window

The query group of a key head is folded into the rows of the matrix product. The keys are split over `splits`
programs, whose partial results `merge_kernel` joins. Softmax and sums in float32; `torch_attention.py` is the
reference.

Shapes: q [T, Hq, D] (tokens may be strided), pages [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata of
the rows -> the rows of one query in out [T, Hq, D].
Bytes moved: 2 · Hkv · D · itemsize for every key of every row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.online_softmax import attend, key_offsets, shape
from photon_grpc.kernels.lang.jit import cdiv, jit, next_power_of_2, tl

MAX_SPLITS = 16
#: Keys of a step of a program.
BLOCK_N = 32


class SplitTile(NamedTuple):
    """Constants that `decode_kernel` is compiled for.

    BLOCK_M is GROUP padded, BLOCK_N the keys of a step, SPLITS the parts that the keys of a row are split into.
    """

    BLOCK_M: int
    BLOCK_N: int
    SPLITS: int


@jit
def decode_kernel(
    q, pages, out, partials, rows, scale, q_stride, block_stride, table_stride, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Compute a split of the keys of one (row, key head) per program; skip rows of several queries.

    rows: query_start, context_len, block_tables. Writes out [T, Hq, D] where SPLITS is 1, else `partials`: partial
    float32 [B, Hq, SPLITS, D] and its log2 weight [B, Hq, SPLITS].
    """
    query_start, context_len, block_tables = rows
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    HEAD_PAD: tl.constexpr = SHAPE.HEAD_PAD
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    WINDOW: tl.constexpr = SHAPE.WINDOW
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    SPLITS: tl.constexpr = TILE.SPLITS
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = tl.load(query_start + row)
    if tl.load(query_start + row + 1) - query != 1:
        return
    context = tl.load(context_len + row)
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(context - first_key, BLOCK_N), SPLITS) * BLOCK_N
    begin = first_key + split * length
    stop = tl.minimum(begin + length, context)

    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PAD)
    inside = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUP + member
    within = head[:, None] * HEAD_DIM + column[None, :]
    tile = tl.load(q + query.to(tl.int64) * q_stride + within, mask=inside, other=0.0)
    keys = pages + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    table = block_tables + row.to(tl.int64) * table_stride

    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        offsets = key_offsets(table, start, stop, block_stride, SHAPE, BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        in_context = key < stop
        if WINDOW:
            in_context &= key >= context - WINDOW
        high, total, acc = attend(
            tile, keys, values, offsets, in_context, in_context[None, :], high, total, acc, scale, SHAPE, True
        )  # fmt: skip
    answer = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        tl.store(out + query.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + within, answer.to(tile.dtype), mask=inside)
    else:
        partial, partial_weight = partials
        place = (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
        tl.store(partial + place[:, None] * HEAD_DIM + column[None, :], answer, mask=inside)
        tl.store(partial_weight + place, high + tl.log2(total), mask=member < GROUP)


@jit
def merge_kernel(
    partial, partial_weight, out, query_start,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write out for one (row, query head) from its SPLITS partial results; SPLITS is a power of two."""
    row, head = tl.program_id(0), tl.program_id(1)
    query = tl.load(query_start + row)
    if tl.load(query_start + row + 1) - query != 1:
        return
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, HEAD_PAD)
    place = (row.to(tl.int64) * HEADS + head) * SPLITS + split
    weight = tl.load(partial_weight + place)
    high = tl.max(weight, axis=0)
    weight = tl.exp2(weight - tl.where(high == -float("inf"), 0.0, high))
    parts = tl.load(partial + place[:, None] * HEAD_DIM + column[None, :], mask=(column < HEAD_DIM)[None, :], other=0.0)
    total = tl.sum(weight, axis=0)
    answer = tl.sum(parts * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    to = out + (query.to(tl.int64) * HEADS + head) * HEAD_DIM + column
    tl.store(to, answer.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def options(pages: torch.Tensor) -> dict[str, int]:
    """Return the warps and stages of `decode_kernel`."""
    if pages.dtype == torch.float32:
        # Without tensor cores the tiles of a float32 product live in registers: fewer warps spill them.
        return {"num_warps": 8, "num_stages": 2}
    return {"num_warps": 1 if pages.shape[5] <= 64 else 2, "num_stages": 3}


def tile(group: int, splits: int) -> SplitTile:
    """Return the constants for `group` query heads of a key head."""
    return SplitTile(max(16, next_power_of_2(group)), BLOCK_N, splits)


def num_splits(num_pairs: int, max_keys: int, multiprocessors: int) -> int:
    """Return the splits of each of `num_pairs` (row, key head) pairs: a power of two that fills the device.

    At most four programs for each multiprocessor: with more, the merge costs what the splits gain (measured on an H200
    at 1 to 256 rows of 272 to 4,096 keys). A split is at least one tile of the most keys that a row may see.
    """
    splits = 1
    while (
        splits < MAX_SPLITS and 2 * splits * num_pairs <= 4 * multiprocessors and 2 * splits <= cdiv(max_keys, BLOCK_N)
    ):
        splits *= 2
    return splits


def launch(
    q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor, *, splits: int
) -> None:
    """Fill the rows of `out` that have one query."""
    num_rows, q_heads, found = meta.context_len.shape[0], q.shape[1], shape(q.shape[1], pages, meta.window)
    partials = None
    if splits > 1:
        partial = torch.empty((num_rows, q_heads, splits, found.HEAD_DIM), dtype=torch.float32, device=q.device)
        weight = torch.empty((num_rows, q_heads, splits), dtype=torch.float32, device=q.device)
        partials = partial, weight
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = meta.log2_scale, q.stride(0), pages.stride(0), meta.block_tables.stride(0)
    decode_kernel[(num_rows, found.KV_HEADS, splits)](
        q, pages[:, layer], out, partials, rows, *numbers, found, tile(found.GROUP, splits), **options(pages)
    )
    if splits > 1:
        sizes = {"HEADS": q_heads, "HEAD_DIM": found.HEAD_DIM, "HEAD_PAD": found.HEAD_PAD, "SPLITS": splits}
        merge_kernel[(num_rows, q_heads)](partial, weight, out, meta.query_start, num_warps=1, **sizes)
