"""Attention of one query a row, or of a few, as decode steps run it, after a small dependent kernel.

At many rows, lengths equal and mixed; and few rows of long contexts. Alone it takes other heads, windows and queries:

python -m benchmarks.kernels.decode_attention [--heads 8,4,256] [--rows 1,64] [--contexts 272,8192] [--windows 0,512]
    [--queries 1,4] [--kv fp8] [--library]
"""

from __future__ import annotations

import argparse
import itertools
import random
from dataclasses import replace
from functools import partial

import torch

from benchmarks.kernels.timing import Shape, measure_us, needs_gpu, num_copies, print_report_header, report, shapes
from photon_grpc.kernels import AttentionMetadata, DependentChain, Kernels
from photon_grpc.kernels.attention import gluon_decode
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.gluon import can_fuse
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE, PageScales
from photon_grpc.kernels.linear import embed

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


def batch(
    shape: Shape, contexts: list[int], device: torch.device, window: int = 0, queries: int = 1
) -> AttentionMetadata:  # fmt: skip
    """Return rows whose pages are in random order."""
    pages = [-(-context // BLOCK_SIZE) for context in contexts]
    max_len = 4096 if max(contexts) <= 4096 else 32768
    tables = torch.zeros(len(contexts), max_len // BLOCK_SIZE, dtype=torch.int32)
    blocks = (torch.randperm(sum(pages), dtype=torch.int32) + 1).split(pages)
    for row, of_row in zip(tables, blocks, strict=True):
        row[: len(of_row)] = of_row
    return AttentionMetadata(
        query_start=torch.arange(len(contexts) + 1, dtype=torch.int32, device=device) * queries,
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        scale=shape.head_dim**-0.5,
        max_query_len=queries,
        max_context_len=max_len,
        window=window,
    )


def row_us(
    shape: Shape,
    contexts: list[int],
    device: torch.device,
    window: int = 0,
    queries: int = 1,
    kv: torch.dtype | None = None,
) -> float:
    """Return microseconds a layer, less those of the small kernel before it, which writes the queries."""
    meta, rows = batch(shape, contexts, device, window, queries), len(contexts) * queries
    num_blocks = int(meta.block_tables.max()) + 1
    layers = max(8, num_copies(kv_bytes(shape, contexts, window) // (2 if kv else 1), device))
    sizes = num_blocks, layers, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim
    cache = torch.empty(sizes, dtype=shape.dtype, device=device).normal_().to(kv or shape.dtype)
    if kv is not None:
        scales = PageScales.ones(shape.kv_heads, torch.zeros(1, dtype=torch.int64, device=device))
        meta = replace(meta, kv_scales=(scales,) * layers)
    table = torch.randn(rows, shape.q_heads * shape.head_dim, device=device).to(shape.dtype)
    ids = torch.arange(rows, dtype=torch.int32, device=device)
    q, out = torch.empty_like(table), torch.empty_like(table)
    sums = torch.empty(rows, table.shape[1] // squares.GROUP, device=device)
    counters = torch.zeros(8 * rows * shape.kv_heads, dtype=torch.int32, device=device)
    chain = DependentChain(counters, history_is_settled=True)
    heads = rows, shape.q_heads, shape.head_dim

    def step(layer: int) -> None:
        embed.launch(table, ids, q, sums)
        gluon_decode.launch(q.view(heads), cache, layer, meta, out.view(heads), chain=chain)

    before = measure_us([partial(embed.launch, table, ids, q, sums)] * layers, device)
    return measure_us([partial(step, layer) for layer in range(layers)], device) - before


def library_us(shape: Shape, rows: int, context: int, device: torch.device) -> float:
    """Return microseconds of PyTorch's attention over keys and values without pages, of rows of equal length."""
    layers = max(4, num_copies(kv_bytes(shape, [context] * rows), device))
    sizes = layers, 2, rows, shape.kv_heads, context, shape.head_dim
    cache = torch.empty(sizes, dtype=shape.dtype, device=device).normal_()
    q = torch.randn(rows, shape.q_heads, 1, shape.head_dim, device=device).to(shape.dtype)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    return measure_us([partial(attend, q, *cache[layer]) for layer in range(layers)], device)


def kv_bytes(shape: Shape, contexts: list[int], window: int = 0) -> int:
    return (
        2
        * sum(min(context, window or context) for context in contexts)
        * shape.kv_heads
        * shape.head_dim
        * shape.dtype.itemsize
    )


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


def main() -> None:
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=numbers, default=[32, 8, 128], help="query heads, key heads, head_dim")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=numbers, default=[272])
    parser.add_argument("--windows", type=numbers, default=[0], help="keys that a query sees; 0: all")
    parser.add_argument("--queries", type=numbers, default=[1], help="of each row")
    parser.add_argument("--kv", choices=["auto", "fp8"], default="auto", help="numbers of the pages")
    parser.add_argument("--library", action="store_true", help="also PyTorch's scaled_dot_product_attention")
    arguments = parser.parse_args()
    needs_gpu("decode_attention")
    device, shape = torch.device("cuda"), Shape(0, *arguments.heads, 0, torch.bfloat16)
    print_report_header(f"decode_attention of {arguments.heads}")
    cases = itertools.product(arguments.rows, arguments.contexts, arguments.windows, arguments.queries)
    for rows, context, window, queries in cases:
        kv = PAGE_DTYPE if arguments.kv == "fp8" else None
        us = row_us(shape, [context] * rows, device, window, queries, kv)
        case = f"rows {rows} context {context} window {window} queries {queries}"
        num_bytes = kv_bytes(shape, [context] * rows, window) // (2 if kv else 1)
        report(case, us, num_bytes, device, bytes_per_second=READ_BYTES_PER_SECOND)
        if arguments.library and (window, queries, kv) == (0, 1, None):
            us = library_us(shape, rows, context, device)
            report(f"{case}, the library", us, num_bytes, device, bytes_per_second=READ_BYTES_PER_SECOND)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
