"""Random paged batches whose every byte that no row may read is NaN, and attention over them in plain order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from photon_grpc.kernels import AttentionMetadata, Kernels
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang.page_scales import PageScales


@dataclass(frozen=True)
class Shape:
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class PagedBatch:
    """q [T, Hq, D] for `counts` queries a row, dense keys and values [context, Hkv, D] of each row, and their pages."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache: torch.Tensor
    layer: int
    meta: AttentionMetadata


def paged_batch(
    shape: Shape,
    counts: list[int],
    contexts: list[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    window: int = 0,
    in_8_bits: bool = False,
) -> PagedBatch:
    """Return rows of `contexts` keys in blocks of random order, the last counts[b] of them new; layer 1 of 3.

    NaN is in block 0, in every block that no row owns, in the other layers, after each row's last key, and in the
    pages that a block table names after the row's context. Pages wholly behind the window of a row's oldest query are
    block 0. With `in_8_bits` pages are e4m3 with scales of each layer, plane and head; dense keys are their values.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-context // shape.block_size) for context in contexts]
    num_blocks = sum(pages) + 4
    cache = torch.full((num_blocks, 3, 2, shape.kv_heads, shape.block_size, shape.head_dim), torch.nan)
    owned = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    unowned = owned.pop()
    tables = torch.full((len(contexts), max(pages) + 2), unowned, dtype=torch.int32)
    keys, values = [], []
    scales = random_scales(shape.kv_heads, generator) if in_8_bits else None
    for row, context in enumerate(contexts):
        dense = torch.randn((2, context, shape.kv_heads, shape.head_dim), generator=generator)
        given = dense
        if scales is not None:
            each = scales[1].scales[:, None, :, None]
            dense = (dense / each).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            given = dense.double() * each.double()
        for page in range(pages[row]):
            block = tables[row, page] = owned.pop()
            here = dense[:, page * shape.block_size : (page + 1) * shape.block_size]
            cache[block, 1, :, :, : here.shape[1]] = here.transpose(1, 2)
        if window:
            tables[row, : max(0, context - counts[row] - window + 1) // shape.block_size] = 0
        keys.append(given[0] if in_8_bits else given[0].to(dtype))
        values.append(given[1] if in_8_bits else given[1].to(dtype))
    projection = torch.randn((sum(counts), shape.q_heads + 2, shape.head_dim), generator=generator)
    meta = AttentionMetadata(
        query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        scale=shape.head_dim**-0.5,
        max_query_len=max(counts),
        max_context_len=max(contexts),
        min_query_len=min(count for count in counts if count),
        window=window,
        kv_scales=scales and tuple(each.to(device) for each in scales),
    )
    q = projection.to(dtype).to(device)[:, : shape.q_heads]
    cache = cache.to(torch.float8_e4m3fn if in_8_bits else dtype).to(device)
    return PagedBatch(q, keys, values, cache, 1, meta)


def random_scales(kv_heads: int, generator: torch.Generator) -> tuple[PageScales, ...]:
    """Return constants of three layers, no powers of two, that let the pages hold normal numbers."""
    found = []
    for _ in range(3):
        scales = PageScales.ones(kv_heads, torch.zeros(1, dtype=torch.int64))
        scales.set(0.02 + 0.1 * torch.rand((2, kv_heads), generator=generator))
        found.append(scales)
    return tuple(found)


def attend(kernels: Kernels, q: torch.Tensor, pages: torch.Tensor, plane: int, meta: AttentionMetadata) -> torch.Tensor:
    """Return the output for one layer's q [T, Hq, D] of the kernels chosen for a step of these rows."""
    slot_mapping = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
    spec = AttentionSpec(q.shape[1], meta.scale, q.dtype)
    return kernels.attention(spec, meta, pages, slot_mapping).attend(q, plane)


def expected(batch: PagedBatch) -> torch.Tensor:
    """Return attention in float64, one query at a time, from the dense keys: [T, Hq, D] on the CPU."""
    q = batch.q.double()
    group = q.shape[1] // batch.cache.shape[3]
    starts = batch.meta.query_start.tolist()
    out = torch.empty_like(q)
    for row, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True)):
        key = key.to(q.device).double().repeat_interleave(group, dim=1)
        value = value.to(q.device).double().repeat_interleave(group, dim=1)
        for token in range(starts[row], starts[row + 1]):
            seen = key.shape[0] - (starts[row + 1] - 1 - token)
            first = max(0, seen - batch.meta.window) if batch.meta.window else 0
            scores = torch.einsum("hd,nhd->hn", q[token], key[first:seen]) * batch.meta.scale
            out[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value[first:seen])
    return out.cpu()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return the rounding of the dtype: outputs are weighted means of values near 1."""
    return {
        torch.float32: {"rtol": 1e-5, "atol": 2e-6},
        torch.float16: {"rtol": 2e-3, "atol": 2e-3},
        torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    }[dtype]
