"""How `decode_tile.py` is started: tiles by the number of rows, and alone for the rows of one query of a mixed batch."""

from __future__ import annotations

import math
from typing import Any

import torch

from photon_grpc.kernels.attention.decode_tile import decode_attention_kernel
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.gluon import can_fuse
from photon_grpc.kernels.jit import num_multiprocessors

MAX_SPLITS = 16
HEAD_DIMS = (32, 64, 128)
MAX_GROUP = 16
# head_dim -> (most (row, key head) pairs, tile). Sweeps on an H200, each at contexts of 272, 2,000 and 64 … 1,500 mixed, 8 key heads.
TILES = {
    64: (
        (64, (4, 32, 3, 512)),
        (256, (2, 32, 3, 512)),
        (384, (1, 64, 3, 512)),
        (512, (1, 64, 2, 512)),
        (768, (1, 32, 4, 512)),
        (1024, (1, 32, 3, 512)),
        (math.inf, (1, 64, 2, 512)),
    ),
    128: (
        (512, (1, 32, 3, 96)),
        (math.inf, (2, 32, 2, 96)),
    ),
}


def config(num_pairs: int, group: int, cache: torch.Tensor) -> dict[str, Any]:
    """Compile-time arguments for `num_pairs` (row, key head) pairs, all but SPLITS, EARLY and PDL.

    Few pairs want many keys in flight each, many pairs small programs.
    """
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    warps, keys, steps, share = tile(num_pairs, head_dim)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEADS": 8 if group <= 8 else 16,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "MIN_SHARE": share,
        "BN": keys,
        "KW": warps,
        "NS": steps,
        "num_warps": warps,
    }


def tile(num_pairs: int, head_dim: int) -> tuple[int, int, int, int]:
    """(warps, keys a step of one of them, steps under way, least keys of a share)."""
    return next(found for most_pairs, found in TILES[max(head_dim, 64)] if num_pairs <= most_pairs)


def num_splits(num_pairs: int, max_context_len: int, multiprocessors: int, min_share: int) -> int:
    """Most shares of each of `num_pairs` (row, key head) pairs: a power of two that fills the device with long rows."""
    splits = 1
    while splits < MAX_SPLITS and splits * num_pairs < 2 * multiprocessors and splits * min_share < max_context_len:
        splits *= 2
    return splits


def launch_rows_of_one(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor
) -> None:
    """The rows of one query of a mixed batch, q [T, Hq, D] (tokens may be strided) -> their places in out [T, Hq, D].

    For batches with so many rows that none is shared out: `fills_device`.
    """
    num_rows, kv_heads = meta.context_len.shape[0], cache.shape[3]
    constants = config(num_rows * kv_heads, q.shape[1] // kv_heads, cache)
    rows = meta.query_start, meta.context_len, meta.block_tables
    numbers = meta.log2_scale, q.stride(0), cache.stride(0), meta.block_tables.stride(0)
    decode_attention_kernel[(kv_heads, num_rows, 1)](
        q, cache[:, layer], out, None, None, None, *rows, *numbers, SPLITS=1, EARLY=False, PDL=False, **constants
    )


def fills_device(q: torch.Tensor, cache: torch.Tensor, num_rows: int) -> bool:
    """Whether `launch_rows_of_one` is the kernel for q [T, Hq, D]: Hopper, its dtypes and shapes, rows enough."""
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    return (
        can_fuse(q.device)
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and cache.dtype in (torch.bfloat16, torch.float16)
        and head_dim in HEAD_DIMS
        and q.shape[1] // kv_heads <= MAX_GROUP
        and num_rows * kv_heads >= 2 * num_multiprocessors(q.device)
    )
