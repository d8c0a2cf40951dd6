"""Attention over latents: lanes and expanded values of one layer, at the sizes of DeepSeek-V2-Lite.

    python -m benchmarks.kernels.latent [--rows 1 8 32] [--contexts 272 8192] [--prompts 2048]

Layers are taken in turn, so that no latent is in the cache. TB/s: of the latents of all rows, read once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.kernels.timing import measure_us
from photon_grpc.kernels.attention import latent
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.spec import AttentionSpec

HEADS, RANK, ROTATED, PLAIN, VALUE, BLOCK_SIZE, NUM_LAYERS = 16, 512, 64, 128, 128, 64, 4
SPEC = AttentionSpec(HEADS, 0.1, torch.bfloat16, RANK)


class Step:
    """A step of rows with so many queries each, at the end of a context."""

    def __init__(self, rows: int, queries: int, context: int) -> None:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        columns, num_tokens = -(-context // BLOCK_SIZE), rows * queries
        tables = (torch.randperm(rows * columns, device="cuda") + 1).view(rows, columns).int()
        starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * queries
        lengths = torch.full((rows,), context, device="cuda", dtype=torch.int32)
        meta = AttentionMetadata(starts, lengths, tables, SPEC.scale, queries, context)
        pages = torch.randn(rows * columns + 1, NUM_LAYERS, 1, 1, BLOCK_SIZE, RANK + ROTATED, **options)
        slots = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
        self.attention = latent.attention(SPEC, meta, pages, slots, is_torch=False)
        self.q = torch.randn(num_tokens, HEADS, RANK + ROTATED, **options)
        self.weight = torch.randn(HEADS * (PLAIN + VALUE), RANK, **options) * RANK**-0.5
        self.out = torch.empty(num_tokens, HEADS, VALUE, **options)

    def calls(self) -> list[Callable[[], object]]:
        values = self.attention.values
        return [partial(values, self.q, layer, self.weight, PLAIN, self.out) for layer in range(NUM_LAYERS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[272, 8192])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048])
    args = parser.parse_args()
    print("| rows | queries | context | us a layer | TB/s | TFLOP/s |\n|--:|--:|--:|--:|--:|--:|")
    steps = [(rows, 1, context) for context in args.contexts for rows in args.rows]
    for rows, queries, context in [*steps, *((1, prompt, prompt) for prompt in args.prompts)]:
        step = Step(rows, queries, context)
        taken = measure_us(step.calls(), step.q.device)
        num_bytes = rows * context * (RANK + ROTATED) * 2
        seen = rows * sum(range(context - queries + 1, context + 1))
        flops = 2 * HEADS * seen * (2 * RANK + ROTATED)
        print(
            f"| {rows} | {queries} | {context} | {taken:.1f} | {num_bytes / taken / 1e6:.2f} | "
            f"{flops / taken / 1e6:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
