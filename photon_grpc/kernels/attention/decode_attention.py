"""Attention of one query a row over a paged KV cache, in one kernel that follows another by programmatic dependent launch.

    out[b] = softmax(scale · q[b] · K[: context_len[b]]ᵀ) · V[: context_len[b]]

as `paged_attention.py` has it for rows of one query. Long rows are shared out over at most `splits` programs; each leaves its
partial result, and the last to arrive joins them in the order of their numbers, so that the result is the same every time.
A share is about MIN_SHARE keys long at least: the other programs of a short row leave at once. How a row is cut depends on its
own length and, through `splits` and MIN_SHARE, on the number of rows (a captured step's bucket), never on the other rows' lengths.

Shapes: q [M, Hq · D] contiguous, M >= B, cache [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata of B rows with
max_query_len 1, counters int32 [>= B · Hkv], zero before and after -> out [M, Hq · D]. bf16 and fp16; D a power of two
from 32 to 128, at most 16 query heads for a key head.
Bytes moved: 2 · Hkv · D · itemsize for every key of every row.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.attention.decode_launch import HEAD_DIMS, MAX_GROUP, TILES, config, num_splits
from photon_grpc.kernels.attention.decode_tile import decode_attention_kernel
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.gluon import has_dependent_launch
from photon_grpc.kernels.jit import launches, num_multiprocessors

__all__ = ["HEAD_DIMS", "MAX_GROUP", "TILES", "config", "launch", "reference"]


def reference(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor, counters: torch.Tensor,
    *, history_is_settled: bool = False,
) -> None:  # fmt: skip
    """decode_attention in torch, row by row: fills out."""
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    for row, context in enumerate(meta.context_len.tolist()):
        blocks = meta.block_tables[row, : -(-context // block_size)].long()
        # [blocks, 2, Hkv, block_size, D] -> [2, Hkv, context, D]
        pages = cache[blocks, layer].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :context].float()
        queries = q[row].view(kv_heads, -1, head_dim).float()
        weights = (queries @ pages[0].transpose(1, 2) * meta.scale).softmax(-1)
        out[row] = (weights @ pages[1]).reshape(-1)


def launch(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, out: torch.Tensor, counters: torch.Tensor,
    *, history_is_settled: bool = False,
) -> None:  # fmt: skip
    """Fills out; rows of q and out from B = len(meta.context_len) on are left alone.

    With `history_is_settled` nothing but a row's newest key was written since this chain of dependent launches began: then older keys
    are fetched while the kernel before still runs.
    """
    if not launches(q):
        return reference(q, cache, layer, meta, out, counters)
    num_rows, kv_heads, head_dim = meta.context_len.shape[0], cache.shape[3], cache.shape[5]
    q_heads = q.shape[1] // head_dim
    num_pairs = num_rows * kv_heads
    constants = config(num_pairs, q_heads // kv_heads, cache)
    splits = num_splits(num_pairs, meta.max_context_len, num_multiprocessors(q.device), constants["MIN_SHARE"])
    partial = weight = None
    if splits > 1:
        partial = torch.empty((num_rows, q_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        weight = torch.empty((num_rows, q_heads, splits), dtype=torch.float32, device=q.device)
    pdl = has_dependent_launch(q.device)
    options = {"launch_pdl": True} if pdl else {}
    rows = None, meta.context_len, meta.block_tables
    numbers = meta.log2_scale, q.stride(0), cache.stride(0), meta.block_tables.stride(0)
    decode_attention_kernel[(kv_heads, num_rows, splits)](
        q, cache[:, layer], out, partial, weight, counters, *rows, *numbers,
        SPLITS=splits, EARLY=history_is_settled, PDL=pdl, **constants, **options,
    )  # fmt: skip
    return None
