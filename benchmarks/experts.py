"""A model with experts: decode steps, with the experts that they reach and the bytes of those, and first tokens.

    python -m benchmarks.experts [--shape qwen3-30b-a3b] [--batch 1 8 64] [--skew 0 1] [-- FLAGS OF serve]

Random weights reach fewer or more experts than trained ones, so no figure stands without theirs: those that one layer
reaches in a step on the average, and how many times the mean the busiest one has. The floor is the bytes of the other
weights, of these experts and of the keys and values at context 272, all in 16 bits, over 4.10 TB/s. `--skew S`
multiplies the rows of every router by (1 + its number)^-S and turns them towards one direction, so that some experts
are reached more often.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmarks import shapes, workloads
from benchmarks.engine import Work, loaded
from benchmarks.offline import READ_BYTES_PER_S, decode_ms
from photon_grpc.layers.experts import Router
from photon_grpc.models.decoder import Decoder

#: Of vLLM 0.24 on an H200, of its own dummy weights.
VLLM_DECODE_MS = {
    "qwen3-30b-a3b": {1: 4.27, 8: 9.07, 64: 17.78},
    "deepseek-v2-lite": {1: 3.27, 8: 3.85, 64: 4.59},
}
VLLM_TTFT_MS = {"qwen3-30b-a3b": 62.6}


def decoder_of(work: Work) -> Decoder:
    launch: Any = work.runner.launch_body
    return launch._step._decoder  # type: ignore[no-any-return]


def skewed(decoder: Decoder, skew: float) -> None:
    """Have some experts reached more often than others."""
    for leaf in decoder.leaves():
        if isinstance(leaf, Router):
            factors = torch.arange(1, len(leaf.weight) + 1, device=leaf.weight.device) ** -skew
            leaf.weight.mul_(factors[:, None].to(leaf.weight.dtype))


def floor_ms(shape: str, batch: int, touched: float) -> float:
    config = workloads.SHAPES[shape]
    num_bytes = shapes.weight_bytes(config, touched) + workloads.kv_bytes(shape, [272] * batch)
    return num_bytes / READ_BYTES_PER_S * 1e3


def decode(work: Work, shape: str, batches: list[int], repeats: int) -> None:
    tally = decoder_of(work).expert_tally
    assert tally is not None
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(workloads.SHAPES[shape][name] for name in names if name in workloads.SHAPES[shape])
    print("\n| batch | ms/step | experts reached | busiest | floor ms | vLLM 0.24 ms | ours / vLLM |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for batch in batches:
        before = tally.tolist()
        step_ms, _ = decode_ms(work, batch, repeats)
        calls, reached, busiest, pairs = (b - a for a, b in zip(before, tally.tolist(), strict=True))
        touched = reached / calls
        peer = VLLM_DECODE_MS.get(shape, {}).get(batch)
        against = f"{peer:.2f} | {step_ms / peer:.2f}" if peer else "– | –"
        floor = floor_ms(shape, batch, touched)
        times = busiest * num_experts / max(1, pairs)
        print(f"| {batch} | {step_ms:.3f} | {touched:.1f} | {times:.1f} x | {floor:.2f} | {against} |", flush=True)


def first_token(work: Work, shape: str, length: int = 2048) -> None:
    times = [work.run([workloads.prompt(902, request, length)], [1]) * 1e3 for request in range(9)]
    peer = VLLM_TTFT_MS.get(shape)
    against = f" (vLLM 0.24: {peer})" if peer else ""
    print(f"\nfirst token after {length:,} prompt tokens: {statistics.median(times[2:]):.2f} ms{against}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=list(workloads.SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0])
    parser.add_argument("flags", nargs="*", help="of serve, behind --")
    args = parser.parse_args()
    if args.layers:
        workloads.SHAPES[args.shape] = workloads.SHAPES[args.shape] | {"num_hidden_layers": args.layers}
    with loaded(args.shape, args.flags) as work:
        for skew in args.skew:
            skewed(decoder_of(work), skew)
            print(f"\n### skew {skew:g}")
            decode(work, args.shape, args.batch, args.repeats)
            first_token(work, args.shape)


if __name__ == "__main__":
    main()
