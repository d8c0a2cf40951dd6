"""Decode and prompt attention over pages, at the context of the decode benchmark and at long ones."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from benchmarks.kernels.timing import Shape, measure_us, num_copies, print_report_header, report, shapes
from photon_grpc.kernels import AttentionMetadata, Kernels
from photon_grpc.kernels.attention.spec import AttentionSpec

# (queries, context) of each row, a name, and on which device.
DECODE = [(1, 272), (8, 272), (64, 272), (256, 272), (1, 4096), (64, 2048)]
# Equal prompts, a chunk far into a prompt, prompts of mixed lengths, and a prompt beside decode rows.
MIXED = [900, 300, 64, 700, 150, 512, 1000, 470]
PROMPTS = [
    ([512], [512]),
    ([2048], [2048]),
    ([2048] * 4, [2048] * 4),
    ([2048] * 8, [2048] * 8),
    ([512], [4096]),
    (MIXED, MIXED),
    ([2048] + [1] * 15, [2048] + [272] * 15),
    ([512] + [1] * 63, [2048] + [272] * 63),
]
CPU_DECODE = [(1, 100), (1, 300), (1, 2000), (16, 100), (16, 300), (16, 1000)]
CPU_PROMPTS = [([32], [32]), ([512], [512]), ([64] + [1] * 15, [300] * 16)]


def batch(
    shape: Shape, counts: list[int], contexts: list[int], block_size: int, device: torch.device
) -> AttentionMetadata:
    """Return rows whose pages are in random order."""
    pages = -(-max(contexts) // block_size)
    tables = torch.randperm(len(counts) * pages, dtype=torch.int32).view(len(counts), pages) + 1
    return AttentionMetadata(
        query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        scale=shape.head_dim**-0.5,
        max_query_len=max(counts),
        max_context_len=max(contexts),
    )


def row(
    kernels: Kernels, device: torch.device, name: str, shape: Shape, case: tuple[list[int], list[int]], page: int
) -> None:
    counts, contexts = case
    meta = batch(shape, counts, contexts, page, device)
    num_bytes = 2 * sum(contexts) * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    pairs = sum(n * (c - n) + n * (n + 1) / 2 for n, c in zip(counts, contexts, strict=True))
    flops = 4 * pairs * shape.q_heads * shape.head_dim
    layers = num_copies(num_bytes, device)
    num_blocks = meta.block_tables.numel() + 1
    cache = torch.empty(
        num_blocks, layers, 2, shape.kv_heads, page, shape.head_dim, dtype=shape.dtype, device=device
    ).normal_()
    q = torch.randn(sum(counts), shape.heads, shape.head_dim, device=device).to(shape.dtype)[:, : shape.q_heads]
    slots = torch.zeros(q.shape[0], dtype=torch.int64, device=device)
    attend = kernels.attention(AttentionSpec(shape.q_heads, meta.scale, q.dtype), meta, cache, slots).attend
    us = measure_us([partial(attend, q, layer) for layer in range(layers)], device)
    prompts = [n for n in counts if n > 1]
    rows = f"{len(prompts)}x{prompts[0]} + {len(counts) - len(prompts)}" if prompts else f"decode {len(counts)}"
    report(f"{name} {rows} context {contexts[0]} page {page}", us, num_bytes, device, flops)


def table(kernels: Kernels, device: torch.device) -> None:
    print_report_header("paged_attention")
    decode, prompts = (CPU_DECODE, CPU_PROMPTS) if device.type == "cpu" else (DECODE, PROMPTS)
    cases = [([1] * rows, [context] * rows) for rows, context in decode] + prompts
    for name, shape in shapes(device).items():
        for case in cases:
            for page in (16,) if device.type == "cpu" else (16, 64):
                row(kernels, device, name, shape, case, page)
