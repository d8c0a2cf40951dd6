"""Attention of one query a row over a paged KV cache, in one kernel that follows another by programmatic dependent launch.

    out[b] = softmax(scale · q[b] · K[: context_len[b]]ᵀ) · V[: context_len[b]]

as `paged_attention.py` has it for rows of one query. The keys of a (row, key head) are shared out over at most `splits`
programs; each leaves its partial result, and the last to arrive joins them in the order of their numbers, so that the result
is the same every time. Shares are a multiple of BLOCK_N keys long: a short row has fewer of them, and the rest leave at once.

Shapes: q [B, Hq · D] contiguous, cache [num_blocks, layers, 2, Hkv, block_size, D], AttentionMeta with max_query_len 1,
counters int32 [>= B · Hkv], zero before and after -> out [B, Hq · D]. bf16, fp16, fp32.
Bytes moved: 2 · Hkv · D · itemsize for every key of every row.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels import paged_attention
from photon_grpc.kernels.gluon import gdc_launch_dependents, gdc_wait, has_dependent_launch
from photon_grpc.kernels.jit import jit, launches, num_multiprocessors, tl
from photon_grpc.kernels.paged_attention import LOG2_E
from photon_grpc.kernels.parts.attention_meta import AttentionMeta
from photon_grpc.kernels.parts.online_softmax import attend, key_offsets


def reference(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMeta, out: torch.Tensor, counters: torch.Tensor
) -> None:
    """decode_attention in torch: fills out."""
    head_dim = cache.shape[5]
    num_rows = meta.context_len.shape[0]
    queries = q[:num_rows].view(num_rows, -1, head_dim)
    out[:num_rows] = paged_attention.reference(queries, cache, layer, meta).view(num_rows, -1)


@jit
def decode_attention_kernel(
    q, pages, out, partial, partial_weight, counters, context_len, block_tables, scale, block_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for (row, key head, share of the keys)."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    context = tl.load(context_len + row)
    share = tl.cdiv(tl.cdiv(context, BLOCK_N), SPLITS) * BLOCK_N
    num_shares = tl.cdiv(context, share)
    if split >= num_shares:
        return
    begin = split * share
    stop = tl.minimum(begin + share, context)

    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PAD)
    inside = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    head = row.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + member
    within = head[:, None] * HEAD_DIM + column[None, :]
    tile = tl.load(q + within, mask=inside, other=0.0)
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
    if SPLITS > 1:  # noqa: SIM102 - the inner question is one of the device
        if num_shares > 1:
            # Every share has seen a key: high is finite and total positive.
            place = head * SPLITS + split
            tl.store(partial + place[:, None] * HEAD_DIM + column[None, :], acc / total[:, None], mask=inside)
            tl.store(partial_weight + place, high + tl.log2(total), mask=member < GROUP)
            tl.debug_barrier()
            counter = counters + row * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") != num_shares - 1:
                return
            tl.store(counter, 0)
            high, total, acc = join_shares(
                partial, partial_weight, head, num_shares, column, inside,
                GROUP, HEAD_DIM, HEAD_PAD, SPLITS, BLOCK_M,
            )  # fmt: skip
    tl.store(out + within, (acc / total[:, None]).to(tile.dtype), mask=inside)


@jit
def join_shares(
    partial, partial_weight, head, num_shares, column, inside,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(high, total, acc) over the shares' results, read past the first-level cache; rows behind GROUP mean nothing."""
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    is_head = tl.arange(0, BLOCK_M) < GROUP
    for share in range(num_shares):
        place = head * SPLITS + share
        weight = tl.load(partial_weight + place, mask=is_head, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial + place[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0, cache_modifier=".cg"
        )
        new_high = tl.maximum(high, weight)
        shrink, factor = tl.exp2(high - new_high), tl.exp2(weight - new_high)
        acc = acc * shrink[:, None] + part * factor[:, None]
        total = total * shrink + factor
        high = new_high
    return high, total, acc


def config(q_heads: int, cache: torch.Tensor) -> dict[str, Any]:
    """Compile-time arguments, all but SPLITS and PDL."""
    return paged_attention.decode_config(q_heads, cache)


def launch(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMeta, out: torch.Tensor, counters: torch.Tensor
) -> None:
    """Fills out [>= B, Hq · D] for q [>= B, Hq · D]; rows of both from B = len(meta.context_len) on are left alone."""
    if not launches(q):
        return reference(q, cache, layer, meta, out, counters)
    num_rows, _, kv_heads = meta.context_len.shape[0], None, cache.shape[3]
    head_dim = cache.shape[5]
    q_heads = q.shape[1] // head_dim
    constants = config(q_heads, cache)
    pdl = has_dependent_launch(q.device)
    splits = paged_attention.num_splits(
        num_rows * kv_heads, meta.max_context_len, num_multiprocessors(q.device), constants["BLOCK_N"]
    )
    partial = weight = None
    if splits > 1:
        partial = torch.empty((num_rows, q_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        weight = torch.empty((num_rows, q_heads, splits), dtype=torch.float32, device=q.device)
    rows = counters, meta.context_len, meta.block_tables
    numbers = meta.scale * LOG2_E, cache.stride(0), meta.block_tables.stride(0)
    options = {"launch_pdl": True} if pdl else {}
    decode_attention_kernel[(num_rows, kv_heads, splits)](
        q, cache[:, layer], out, partial, weight, *rows, *numbers, SPLITS=splits, PDL=pdl, **constants, **options
    )
    return None
