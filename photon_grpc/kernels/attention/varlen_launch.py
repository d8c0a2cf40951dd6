"""How `varlen_tile.py` is started, and for which batches."""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.varlen_tile import CONSUMER_PAIRS, descriptor, varlen_tile_kernel
from photon_grpc.kernels.gluon import can_fuse
from photon_grpc.kernels.jit import num_multiprocessors, once

#: Rows of the cache that the bulk copy engine can number; one behind them means zeros.
MAX_CACHE_ROWS = 0x7FFFFF00
# head_dim -> fewest queries a row, on average: a program takes a multiprocessor, which short prompts and decode rows do not repay.
# On an H200, µs of varlen_kernel / this one: D 64: 8 x 512 45 / 53, 2,048 68 / 52; D 128: 128 7 / 8, 512 15.4 / 13.9, 4 x 2,048 406 / 266.
MIN_QUERIES_PER_ROW = {64: 1024, 128: 256}
# head_dim -> (keys a tile, tiles under way, whether scores are computed a tile ahead).
# Sweep on an H200, 4 x 2,048 and 1 x 2,048 tokens, 512 behind 3,584, and eight prompts of 64 to 1,000.
TILES = {64: (128, 3, False), 128: (64, 3, True)}
# (head_dim, consumers) -> registers of a consumer's and of the producer's threads, together all of a multiprocessor's. The
# producer clears the tail of a tile of values, which takes more of them where a value is wider.
REGISTERS = {(64, 2): (240, 24), (64, 3): (160, 24), (128, 2): (232, 40), (128, 3): (160, 32)}


def num_consumers(q: torch.Tensor, kv_heads: int, multiprocessors: int) -> int:
    """Groups of warps that share each tile of keys: three where there are tiles for two waves, else two."""
    tiles = q.shape[0] * (q.shape[1] // kv_heads) // (3 * CONSUMER_PAIRS) * kv_heads
    return 3 if tiles >= 2 * multiprocessors else 2


def config(q_heads: int, cache: torch.Tensor, consumers: int) -> dict[str, Any]:
    """Compile-time arguments."""
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    keys, stages, ahead = TILES[head_dim]
    consumer_registers, producer_registers = REGISTERS[head_dim, consumers]
    return {
        "KV_HEADS": kv_heads,
        "GROUP": q_heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "CONSUMERS": consumers,
        "PAIRS": CONSUMER_PAIRS,
        "BN": keys,
        "NS": stages,
        "AHEAD": ahead,
        "CONSUMER_REGISTERS": consumer_registers,
        "PRODUCER_REGISTERS": producer_registers,
        "num_warps": 4,
    }


def launch_tiles(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor, consumers: int
) -> None:
    """The rows of several queries, q [T, Hq, D] (tokens may be strided) -> their places in out [T, Hq, D]; see `suits`."""
    _, layers, _, kv_heads, block_size, _ = cache.shape
    constants = config(q.shape[1], cache, consumers)
    num_rows = meta.context_len.shape[0]
    tile = consumers * CONSUMER_PAIRS // constants["GROUP"]
    plane = kv_heads * block_size
    varlen_tile_kernel[(kv_heads, q.shape[0] // tile + num_rows)](
        q, descriptor(cache, min(block_size, constants["BN"])), out,
        meta.query_start, meta.context_len, meta.block_tables, num_rows, meta.log2_scale,
        layer * 2 * plane, q.stride(0), meta.block_tables.stride(0), layers * 2 * plane, plane, **constants,
    )  # fmt: skip


@once
def preload(
    device: torch.device, dtype: torch.dtype, q_heads: int, kv_heads: int, block_size: int, head_dim: int
) -> None:
    """Launches the kernel with either number of consumers, for two queries and a cache of one page: it is compiled and loaded then.

    What the kernel is specialised for follows from these shapes: every stride of q and of the cache is a multiple of 16.
    """
    q, out = torch.zeros((2, 2, q_heads, head_dim), dtype=dtype, device=device)
    cache = torch.zeros((1, 1, 2, kv_heads, block_size, head_dim), dtype=dtype, device=device)
    context_len = torch.full((1,), 2, dtype=torch.int32, device=device)
    query_start = torch.nn.functional.pad(context_len, (1, 0))
    block_tables = torch.zeros((1, 1), dtype=torch.int32, device=device)
    meta = AttentionMetadata(query_start, context_len, block_tables, 1.0, max_query_len=2, max_context_len=2)
    for consumers in (2, 3):
        launch_tiles(q, cache, 0, meta, out, consumers)


def launch(q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor) -> None:
    """`launch_tiles` with as many consumers as the batch is best shared by."""
    kv_heads = cache.shape[3]
    if not torch.cuda.is_current_stream_capturing():
        # Now, in a warm-up, and not before somebody's long prompt. Results are the same to the bit.
        preload(q.device, cache.dtype, q.shape[1], *cache.shape[3:])
    launch_tiles(q, cache, layer, meta, out, num_consumers(q, kv_heads, num_multiprocessors(q.device)))


def suits(q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> bool:
    """Whether `launch` is the way for q [T, Hq, D]: Hopper, its dtypes and shapes, prompts rather than decode rows."""
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    group = q.shape[1] // kv_heads
    return (
        can_fuse(q.device)
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and cache.dtype in (torch.bfloat16, torch.float16)
        and head_dim in TILES
        and CONSUMER_PAIRS % group == 0
        and block_size % 64 == 0
        and block_size & (block_size - 1) == 0
        and cache.is_contiguous()
        and cache.numel() // head_dim < MAX_CACHE_ROWS
        and meta.scale > 0
        and q.shape[0] >= MIN_QUERIES_PER_ROW[head_dim] * meta.context_len.shape[0]
    )
