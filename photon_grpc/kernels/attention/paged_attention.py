"""Attention of a mixed batch (decode rows, prompts, chunks of prompts) over a paged KV cache.

    out[t] = softmax(scale · q[t] · K[: p + 1]ᵀ) · V[: p + 1],  p the position of token t in its row

Grouped queries: query head h reads key head h // (Hq / Hkv). Softmax and sums in float32.

Shapes: q [T, Hq, D] (tokens may be strided), cache [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata for the
rows -> out [T, Hq, D]. All new keys are in the cache before any row attends. bf16, fp16, fp32; any block_size.
Bytes moved: 2 · Hkv · D · itemsize for every key of every row (once for each tile of queries), and q and out.

Two kernels: `decode` for rows of one query, the query group folded into the rows of the matrix product and the keys
shared out over `splits` programs whose partial results `merge` joins; `varlen` for rows of several queries, one program
for a tile of (query, head of the group) pairs and one key head.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.attention import decode_launch, varlen_launch
from photon_grpc.kernels.attention.find_tile import find_tile
from photon_grpc.kernels.attention.metadata import QUERY_TILE, AttentionMetadata, DecodeGather, GatherPlan, RowGather
from photon_grpc.kernels.attention.online_softmax import attend, key_offsets
from photon_grpc.kernels.jit import cdiv, jit, launches, next_power_of_2, num_multiprocessors, tl

MAX_SPLITS = 16


def reference(q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata) -> torch.Tensor:
    """paged_attention in torch: pages gathered row by row, short decode rows together."""
    plan = meta.gather_plan(cache)
    # A padded batch has queries that belong to no row.
    if plan.covers_all and plan.decode.queries.shape[0] == q.shape[0]:
        return _attend_together(q, cache, layer, meta.scale, plan.decode)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if plan.decode is not None:
        queries = plan.decode.queries
        out[queries] = _attend_together(q[queries], cache, layer, meta.scale, plan.decode)
    for row in plan.rows:
        _attend_row(q, out, cache, layer, meta.scale, plan, row)
    return out


def _attend_together(
    q: torch.Tensor, cache: torch.Tensor, layer: int, scale: float, gather: DecodeGather
) -> torch.Tensor:
    """Rows of one query each, q [B, Hq, D], over one gather of all their keys, masked to the length of each."""
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    keys = cache.view(-1, head_dim)[layer * 2 * kv_heads * block_size :]
    k, v = keys.index_select(0, gather.keys).view(2, q.shape[0], kv_heads, -1, head_dim)
    grouped = q.reshape(q.shape[0], kv_heads, -1, head_dim)
    return _attention(grouped, k, v, gather.mask, scale).reshape(q.shape)


def _attend_row(
    q: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, layer: int, scale: float, plan: GatherPlan, row: RowGather
) -> None:
    """One row, QUERY_TILE queries at a time, each tile against the keys up to its last query.

    The group is folded into the query rows (never `enable_gqa`, which is many times slower on a CPU).
    """
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    group = q.shape[1] // kv_heads
    planes = cache.view(-1, block_size * head_dim)[layer * 2 * kv_heads :]
    k, v = planes.index_select(0, row.planes).view(2, 1, kv_heads, -1, head_dim)
    if row.count == 1:
        grouped = q[row.start].reshape(1, kv_heads, group, head_dim)
        out[row.start] = _attention(grouped, k[:, :, : row.context], v[:, :, : row.context], None, scale).view(
            -1, head_dim
        )
        return
    before = row.context - row.count
    for first in range(0, row.count, QUERY_TILE):
        count = min(QUERY_TILE, row.count - first)
        seen = before + first + count
        tile = slice(row.start + first, row.start + first + count)
        folded = q[tile].unflatten(1, (kv_heads, group)).transpose(0, 1).reshape(1, kv_heads, count * group, head_dim)
        mask = plan.causal_mask(count, seen, group) if count > 1 else None
        answer = _attention(folded, k[:, :, :seen], v[:, :, :seen], mask, scale)
        unfolded = answer.view(kv_heads, count, group, head_dim).transpose(0, 1)
        out[tile].view(count, kv_heads, group, head_dim).copy_(unfolded)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """softmax(scale · q kᵀ + mask) v, in float32 and back; q [B, Hkv, M, D], k and v [B, Hkv, N, D]."""
    if not q.is_cuda:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    # The fused backends on CUDA want masks aligned to 16 bytes (cuDNN's faults where they are not); corners are not.
    scores = (q.float() * scale) @ k.float().transpose(-1, -2)
    if mask is not None:
        scores += mask
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


@jit
def decode_kernel(
    q, pages, out, partial, partial_weight, query_start, context_len, block_tables,
    scale, q_stride, block_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for (row, key head, share of the keys); rows of several queries are left to `varlen`.

    Writes out [T, Hq, D] where SPLITS is 1, else partial float32 [B, Hq, SPLITS, D] and its log2 weight [B, Hq, SPLITS].
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = tl.load(query_start + row)
    if tl.load(query_start + row + 1) - query != 1:
        return
    context = tl.load(context_len + row)
    share = tl.cdiv(tl.cdiv(context, BLOCK_N), SPLITS) * BLOCK_N
    begin = split * share
    stop = tl.minimum(begin + share, context)

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
        offsets = key_offsets(table, start, stop, block_stride, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
        in_context = start + tl.arange(0, BLOCK_N) < stop
        high, total, acc = attend(
            tile, keys, values, offsets, in_context, in_context[None, :], high, total, acc, scale,
            HEAD_DIM, HEAD_PAD, PRECISION, True,
        )  # fmt: skip
    answer = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        tl.store(out + query.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + within, answer.to(tile.dtype), mask=inside)
    else:
        place = (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
        tl.store(partial + place[:, None] * HEAD_DIM + column[None, :], answer, mask=inside)
        tl.store(partial_weight + place, high + tl.log2(total), mask=member < GROUP)


@jit
def merge_kernel(
    partial, partial_weight, out, query_start,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out of one (row, query head) from its SPLITS partial results; SPLITS is a power of two."""
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


@jit
def varlen_kernel(
    q, pages, out, query_start, context_len, block_tables, num_rows,
    scale, q_stride, block_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for (tile of BLOCK_M // GROUP queries of one row, key head); rows of one query are left to `decode`."""
    TILE: tl.constexpr = BLOCK_M // GROUP
    # From the last tile to the first: the last tiles of a prompt see the most keys and should not be begun last.
    program, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, first_query, count, first = find_tile(query_start, num_rows, program, TILE)
    if (count == 1) | (first >= count):
        return
    before = tl.load(context_len + row) - count

    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PAD)
    token = first + member // GROUP
    valid = (token < count) & (member < TILE * GROUP)
    inside = valid[:, None] & (column < HEAD_DIM)[None, :]
    query = (first_query + token).to(tl.int64)
    within = (kv_head * GROUP + member % GROUP)[:, None] * HEAD_DIM + column[None, :]
    tile = tl.load(q + query[:, None] * q_stride + within, mask=inside, other=0.0)
    keys = pages + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    table = block_tables + row.to(tl.int64) * table_stride

    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    stop = before + tl.minimum(first + TILE, count)
    seen_by_all = (before + first + 1) // BLOCK_N * BLOCK_N
    for start in range(0, seen_by_all, BLOCK_N):
        offsets = key_offsets(table, start, stop, block_stride, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
        high, total, acc = attend(
            tile, keys, values, offsets, None, None, high, total, acc, scale,
            HEAD_DIM, HEAD_PAD, PRECISION, False,
        )  # fmt: skip
    for start in range(seen_by_all, stop, BLOCK_N):
        offsets = key_offsets(table, start, stop, block_stride, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] <= (before + token)[:, None]) & (key < stop)[None, :]
        high, total, acc = attend(
            tile, keys, values, offsets, key < stop, visible, high, total, acc, scale,
            HEAD_DIM, HEAD_PAD, PRECISION, True,
        )  # fmt: skip
    answer = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(tile.dtype)
    tl.store(out + query[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + within, answer, mask=inside)


def shape_config(q_heads: int, cache: torch.Tensor) -> dict[str, Any]:
    """Compile-time arguments of both kernels that follow from the shapes."""
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    return {
        "KV_HEADS": kv_heads,
        "GROUP": q_heads // kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        # float32 means float32: the tensor cores' tf32 would lose half of the digits.
        "PRECISION": "ieee" if cache.dtype == torch.float32 else "tf32",
    }


def decode_config(q_heads: int, cache: torch.Tensor) -> dict[str, Any]:
    """Compile-time arguments of `decode`, all but SPLITS."""
    shape = shape_config(q_heads, cache)
    wide = cache.dtype == torch.float32
    return shape | {
        "BLOCK_M": max(16, next_power_of_2(shape["GROUP"])),
        "BLOCK_N": 32,
        # Without tensor cores the tiles of a float32 product live in registers: fewer warps spill them.
        "num_warps": 8 if wide else (1 if shape["HEAD_PAD"] <= 64 else 2),
        "num_stages": 2 if wide else 3,
    }


def varlen_config(q_heads: int, cache: torch.Tensor) -> dict[str, Any]:
    """Compile-time arguments of `varlen`."""
    shape = shape_config(q_heads, cache)
    wide = cache.dtype == torch.float32
    # Of an H200's sweep over 64 to 256 queries, 32 to 128 keys, 4 and 8 warps, 2 to 4 stages, for prompts of 512 and 2,048 tokens.
    return shape | {
        "BLOCK_M": max(32 if wide else 64, next_power_of_2(shape["GROUP"])),
        # Without tensor cores the tiles of a float32 product live in registers: wider ones spill them.
        "BLOCK_N": (32 if shape["HEAD_PAD"] <= 64 else 16) if wide else 64,
        "num_warps": 8 if wide else 4,
        "num_stages": 2 if wide else 3,
    }


def num_splits(num_pairs: int, max_context_len: int, multiprocessors: int, block_n: int) -> int:
    """Shares of the keys of each of `num_pairs` (row, key head) pairs: a power of two that fills the device.

    Up to four programs for each multiprocessor: with more, the merge costs what the shares gain (measured on an H200 at
    1 to 256 rows of 272 to 4,096 keys). A share is at least one tile of the longest possible context.
    """
    splits = 1
    while (
        splits < MAX_SPLITS
        and 2 * splits * num_pairs <= 4 * multiprocessors
        and 2 * splits <= cdiv(max_context_len, block_n)
    ):
        splits *= 2
    return splits


def launch_decode(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor, splits: int
) -> None:
    """Fill the rows of `out` that have one query."""
    num_rows, q_heads = meta.context_len.shape[0], q.shape[1]
    config = decode_config(q_heads, cache)
    kv_heads, head_dim = config["KV_HEADS"], config["HEAD_DIM"]
    partial = weight = None
    if splits > 1:
        partial = torch.empty((num_rows, q_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        weight = torch.empty((num_rows, q_heads, splits), dtype=torch.float32, device=q.device)
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = meta.log2_scale, q.stride(0), cache.stride(0), meta.block_tables.stride(0)
    grid = (num_rows, kv_heads, splits)
    decode_kernel[grid](q, cache[:, layer], out, partial, weight, *rows, *numbers, SPLITS=splits, **config)
    if splits > 1:
        shape = {"HEADS": q_heads, "HEAD_DIM": head_dim, "HEAD_PAD": config["HEAD_PAD"], "SPLITS": splits}
        merge_kernel[(num_rows, q_heads)](partial, weight, out, meta.query_start, num_warps=1, **shape)


def launch_varlen(q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor) -> None:
    """Fill the rows of `out` that have several queries."""
    if varlen_launch.suits(q, cache, meta):
        varlen_launch.launch(q, cache, layer, meta, out)
        return
    num_rows = meta.context_len.shape[0]
    config = varlen_config(q.shape[1], cache)
    tile = config["BLOCK_M"] // config["GROUP"]
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = num_rows, meta.log2_scale, q.stride(0), cache.stride(0), meta.block_tables.stride(0)
    grid = (q.shape[0] // tile + num_rows, config["KV_HEADS"])
    varlen_kernel[grid](q, cache[:, layer], out, *rows, *numbers, **config)


def launch(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out [T, Hq, D], new where it is not given, contiguous; rows of q that belong to no row of `meta` are left undefined."""
    if not launches(q):
        answer = reference(q, cache, layer, meta)
        return answer if out is None else out.copy_(answer)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_rows, kv_heads = meta.context_len.shape[0], cache.shape[3]
    if not num_rows or not q.shape[0]:
        return out
    if meta.max_query_len > 1:
        launch_varlen(q, cache, layer, meta, out)
    if meta.min_query_len == 1:
        block_n = decode_config(q.shape[1], cache)["BLOCK_N"]
        if decode_launch.fills_device(q, cache, num_rows):
            decode_launch.launch_rows_of_one(q, cache, layer, meta, out)
            return out
        multiprocessors = num_multiprocessors(q.device)
        splits = num_splits(num_rows * kv_heads, meta.max_context_len, multiprocessors, block_n)
        launch_decode(q, cache, layer, meta, out, splits)
    return out
