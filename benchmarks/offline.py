"""The engine without the wire on the named workloads: decode, prefill, TTFT, mixed, shared prefix.

    python -m benchmarks.offline [--shape 1b 8b] [--work decode prefill ttft mixed prefix] [--batch 1 8 64 256]
                                 [-- FLAGS OF serve]
    python -m benchmarks.offline --shape demo

Random weights; every request greedy, EOS ignored, exactly its output tokens. The floor is weight bytes + KV bytes at
context 272 over 4.10 TB/s (what one H200 reads). vLLM's figures are those of version 0.24.0 on the same card, measured
apart from this run. Decode comes first, in a table of its own. `python -m benchmarks.pictures` draws a saved table. The
shape "demo" is the embedded model, for trying this out on a CPU; without flags it runs decode at 1 and 8 and the time
to the first token.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.saved import add_save_flag, saved

READ_BYTES_PER_S = 4.10e12
#: ms per decode step, then tok/s of prefill 32 × 2048, ms to the first token (2048, 128), mixed tok/s, shared prefix in
#: s.
VLLM_DECODE_MS = {
    "1b": {1: 1.296, 4: 1.397, 8: 1.329, 16: 1.542, 32: 1.677, 64: 1.804, 128: 2.363, 256: 3.153},
    "8b": {1: 5.150, 4: 5.207, 8: 5.200, 16: 5.313, 32: 5.644, 64: 6.110, 128: 7.526, 256: 11.292},
}
VLLM_PREFILL = {"1b": 269_791, "8b": 42_701}
VLLM_TTFT_MS = {"1b": (10.86, 4.89), "8b": (51.29, 8.48)}
VLLM_MIXED = {"1b": 42_703, "8b": 9_157}
VLLM_PREFIX_S = {"1b": 0.50}


def decode_ms(work: Work, batch: int, repeats: int = 3) -> tuple[float, float]:
    """(ms per step, output tokens/s): 128 in; what 256 out take longer than 32 out, and 256 tokens over all the time of
    theirs."""
    prompts = [workloads.prompt(900, request, 128) for request in range(batch)]
    work.run(prompts, [32] * batch)
    long = statistics.median(work.run(prompts, [256] * batch) for _ in range(repeats))
    short = statistics.median(work.run(prompts, [32] * batch) for _ in range(repeats))
    return (long - short) / 224 * 1e3, batch * 256 / long


def mixed_s(work: Work, share: float = 1.0) -> tuple[float, int]:
    """(seconds, output tokens) of mixed-512, or of its first part."""
    lengths = workloads.mixed_512()[: max(1, round(512 * share))]
    prompts = [workloads.prompt(903, request, n_in) for request, (n_in, _) in enumerate(lengths)]
    counts = [n_out for _, n_out in lengths]
    work.run(prompts[:64], counts[:64])
    return work.run(prompts, counts), sum(counts)


def prefix_s(work: Work, count: int = 256, repeats: int = 3) -> float:
    """Seconds of the shared prefix, through the prefix cache; no repetition finds anything of the one before."""
    work.run(workloads.shared_prefix(910, count), [64] * count, share=True)
    times = [work.run(workloads.shared_prefix(920 + 2 * i, count), [64] * count, share=True) for i in range(repeats)]
    return statistics.median(times)


def decode(work: Work, shape: str, batches: Sequence[int]) -> None:
    print("\n| batch | ms/step | tok/s | floor ms | vLLM 0.24 ms | ours / vLLM |\n|--:|--:|--:|--:|--:|--:|")
    for batch in batches:
        step_ms, rate = decode_ms(work, batch)
        floor = floor_ms(work, shape, batch)
        peer = VLLM_DECODE_MS.get(shape, {}).get(batch) if floor else None
        against = f"{peer:.3f} | {step_ms / peer:.2f}" if peer else "– | –"
        shown = f"{floor:.3f}" if floor else "–"
        print(f"| {batch} | {step_ms:.3f} | {rate:.0f} | {shown} | {against} |", flush=True)


def floor_ms(work: Work, shape: str, batch: int) -> float | None:
    """None where the bandwidth of an H200 is not what limits."""
    if "H200" not in work.facts.device or shape not in workloads.SHAPES:
        return None
    num_bytes = workloads.weight_bytes(shape) + workloads.kv_bytes(shape, [272] * batch)
    return num_bytes / READ_BYTES_PER_S * 1e3


def prefill(work: Work, shape: str) -> None:
    prompts = [workloads.prompt(901, request, 2048) for request in range(32)]
    work.run(prompts[:2], [1, 1])
    elapsed = statistics.median(work.run(prompts, [1] * 32) for _ in range(3))
    row("prefill 32 × 2048, prompt tok/s", 32 * 2048 / elapsed, VLLM_PREFILL.get(shape), ",.0f")


def ttft(work: Work, shape: str) -> None:
    for length, repeats, peer in zip((2048, 128), (7, 15), VLLM_TTFT_MS.get(shape, (None, None)), strict=True):
        times = [work.run([workloads.prompt(902, request, length)], [1]) * 1e3 for request in range(repeats + 2)]
        row(f"first token after {length:,} prompt tokens, ms", statistics.median(times[2:]), peer, ".2f")


def mixed(work: Work, shape: str) -> None:
    elapsed, num_tokens = mixed_s(work)
    row("mixed-512, output tok/s", num_tokens / elapsed, VLLM_MIXED.get(shape), ",.0f")
    row("mixed-512, s", elapsed, None, ".2f")


def prefix(work: Work, shape: str) -> None:
    row("shared prefix 256 × (1024 + 64), 64 out, caching on, s", prefix_s(work), VLLM_PREFIX_S.get(shape), ".3f")


def row(name: str, ours: float, peer: float | None, form: str) -> None:
    against = f"{peer:{form}} | {ours / peer:.2f}" if peer else "– | –"
    print(f"| {name} | {ours:{form}} | {against} |", flush=True)


#: Each prints a row or two.
WORK: dict[str, Callable[[Work, str], None]] = {"prefill": prefill, "ttft": ttft, "mixed": mixed, "prefix": prefix}


def measure(shape: str, args: argparse.Namespace) -> None:
    batches, names = ([1, 8], ["decode", "ttft"]) if shape == "demo" else ([1, 8, 64, 256], ["decode", *WORK])
    asked = args.work or names
    with loaded(shape, args.flags) as work:
        if "decode" in asked:
            decode(work, shape, args.batch or batches)
        if rows := [name for name in asked if name != "decode"]:
            print("\n| | ours | vLLM 0.24 | ours / vLLM |\n|---|--:|--:|--:|")
            for name in rows:
                WORK[name](work, shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["1b"], choices=[*workloads.SHAPES, "demo"])
    parser.add_argument("--work", nargs="*", choices=["decode", *WORK], help="everything unless given")
    parser.add_argument("--batch", nargs="*", type=int, help="of decode; 1 8 64 256")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: --enforce-eager")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    args.flags += ["--enforce-eager"] if args.eager else []
    with saved(args.save):
        for shape in args.shape:
            measure(shape, args)


if __name__ == "__main__":
    main()
