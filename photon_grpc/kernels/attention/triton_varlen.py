"""Attention of several queries a row over a paged KV cache, in plain Triton: any dtype, any head_dim, any block size.

    out[t] = softmax(scale · q[t] · K[first : p + 1]ᵀ) · V[first : p + 1],  p the position of token t in its row,
    first = 0, or max(0, p - window + 1) where there is a window

One program takes a tile of (query, head of the group) pairs and one key head. Softmax and sums in float32; `torch_attention.py` is the
reference.

Shapes: q [T, Hq, D] (tokens may be strided), pages [num_blocks, planes, 2, Hkv, block_size, D], AttentionMetadata of the rows
-> the rows of several queries in out [T, Hq, D]. All new keys are in the pages before any row attends.
Bytes moved: 2 · Hkv · D · itemsize for every key of every row, once for each tile of queries; and q and out.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.attention.find_tile import find_tile
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.online_softmax import attend, key_offsets, shape_config
from photon_grpc.kernels.jit import jit, next_power_of_2, tl


@jit
def varlen_kernel(
    q, pages, out, query_start, context_len, block_tables, num_rows,
    scale, q_stride, block_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
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
    if WINDOW:
        masked_from = tl.maximum(before + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    else:
        masked_from = (before + first + 1) // BLOCK_N * BLOCK_N
        for start in range(0, masked_from, BLOCK_N):
            offsets = key_offsets(table, start, stop, block_stride, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
            high, total, acc = attend(
                tile, keys, values, offsets, None, None, high, total, acc, scale,
                HEAD_DIM, HEAD_PAD, PRECISION, False,
            )  # fmt: skip
    for start in range(masked_from, stop, BLOCK_N):
        offsets = key_offsets(table, start, stop, block_stride, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] <= (before + token)[:, None]) & (key < stop)[None, :]
        in_context = key < stop
        if WINDOW:
            in_context &= key > before + first - WINDOW
            visible &= key[None, :] > (before + token - WINDOW)[:, None]
        high, total, acc = attend(
            tile, keys, values, offsets, in_context, visible, high, total, acc, scale,
            HEAD_DIM, HEAD_PAD, PRECISION, True,
        )  # fmt: skip
    answer = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(tile.dtype)
    tl.store(out + query[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + within, answer, mask=inside)


def config(q_heads: int, pages: torch.Tensor, window: int = 0) -> dict[str, Any]:
    """Compile-time arguments of `varlen_kernel`."""
    shape = shape_config(q_heads, pages)
    wide = pages.dtype == torch.float32
    # Of an H200's sweep over 64 to 256 queries, 32 to 128 keys, 4 and 8 warps, 2 to 4 stages, for prompts of 512 and 2,048 tokens.
    return shape | {
        "BLOCK_M": max(32 if wide else 64, next_power_of_2(shape["GROUP"])),
        # Without tensor cores the tiles of a float32 product live in registers: wider ones spill them.
        "BLOCK_N": (32 if shape["HEAD_PAD"] <= 64 else 16) if wide else 64,
        "WINDOW": window,
        "num_warps": 8 if wide else 4,
        "num_stages": 2 if wide else 3,
    }


def launch(q: torch.Tensor, pages: torch.Tensor, plane: int, meta: AttentionMetadata, out: torch.Tensor) -> None:
    """Fill the rows of `out` that have several queries."""
    num_rows = meta.context_len.shape[0]
    constants = config(q.shape[1], pages, meta.window)
    tile = constants["BLOCK_M"] // constants["GROUP"]
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = num_rows, meta.log2_scale, q.stride(0), pages.stride(0), meta.block_tables.stride(0)
    grid = (q.shape[0] // tile + num_rows, constants["KV_HEADS"])
    varlen_kernel[grid](q, pages[:, plane], out, *rows, *numbers, **constants)
