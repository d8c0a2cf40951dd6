"""Attention of one query a row as decode steps run it, after a small dependent kernel.

At many rows, lengths equal and mixed; and few rows of long contexts.
"""

from __future__ import annotations

import random
from functools import partial

import torch

from benchmarks.kernels.timing import Shape, measure_us, num_copies, print_report_header, report, shapes
from photon_grpc.kernels import AttentionMetadata, DependentChain, Kernels, embed
from photon_grpc.kernels.attention import gluon_decode
from photon_grpc.kernels.lang.gluon import can_fuse

READ_BYTES_PER_SECOND = 4.5e12
ROWS = (1, 8, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXTS = (128, 272, 700, 2000)
#: (rows, keys of each).
LONG = ((1, 8192), (8, 8192), (32, 8192), (1, 32000), (8, 32000))
BLOCK_SIZE = 64


def contexts_of(rows: int, context: int | None) -> list[int]:
    """Return `rows` equal lengths, or 64 to 1,500 if `context` is None."""
    generator = random.Random(1)
    return [context or generator.randint(64, 1500) for _ in range(rows)]


def batch(shape: Shape, contexts: list[int], device: torch.device) -> AttentionMetadata:
    """Return rows whose pages are in random order."""
    pages = [-(-context // BLOCK_SIZE) for context in contexts]
    max_len = 4096 if max(contexts) <= 4096 else 32768
    tables = torch.zeros(len(contexts), max_len // BLOCK_SIZE, dtype=torch.int32)
    blocks = (torch.randperm(sum(pages), dtype=torch.int32) + 1).split(pages)
    for row, of_row in zip(tables, blocks, strict=True):
        row[: len(of_row)] = of_row
    return AttentionMetadata(
        query_start=torch.arange(len(contexts) + 1, dtype=torch.int32, device=device),
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        scale=shape.head_dim**-0.5,
        max_query_len=1,
        max_context_len=max_len,
    )


def row_us(shape: Shape, contexts: list[int], device: torch.device) -> float:
    """Return microseconds a layer, less those of the small kernel before it, which writes the queries."""
    meta, rows = batch(shape, contexts, device), len(contexts)
    num_blocks = int(meta.block_tables.max()) + 1
    layers = max(8, num_copies(kv_bytes(shape, contexts), device))
    cache = torch.empty(
        num_blocks, layers, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim, dtype=shape.dtype, device=device
    ).normal_()
    table = torch.randn(rows, shape.q_heads * shape.head_dim, device=device).to(shape.dtype)
    ids = torch.arange(rows, dtype=torch.int32, device=device)
    q, out = torch.empty_like(table), torch.empty_like(table)
    counters = torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device=device)
    chain = DependentChain(counters, history_is_settled=True)
    heads = rows, shape.q_heads, shape.head_dim

    def step(layer: int) -> None:
        embed.launch(table, ids, q)
        gluon_decode.launch(q.view(heads), cache, layer, meta, out.view(heads), chain=chain)

    before = measure_us([partial(embed.launch, table, ids, q)] * layers, device)
    return measure_us([partial(step, layer) for layer in range(layers)], device) - before


def kv_bytes(shape: Shape, contexts: list[int]) -> int:
    return 2 * sum(contexts) * shape.kv_heads * shape.head_dim * shape.dtype.itemsize


def table(kernels: Kernels, device: torch.device) -> None:
    if not can_fuse(device):
        return
    print_report_header("decode_attention")
    cases = [(rows, context) for rows in ROWS for context in (*CONTEXTS, None)]
    for name, shape in shapes(device).items():
        for rows, context in (*cases, *LONG):
            contexts = contexts_of(rows, context)
            us = row_us(shape, contexts, device)
            case = f"{name} rows {rows} context {context or 'mixed'}"
            report(case, us, kv_bytes(shape, contexts), device, bytes_per_second=READ_BYTES_PER_SECOND)
