"""Long contexts without the wire: the first token of one prompt, and decode steps whose rows are all as long.

    python -m benchmarks.long_context [--shape 1b 8b] [--context 8192 32000] [--rows 1 8 32] [-- FLAGS OF serve]
    python -m benchmarks.long_context --shape 8b --context 8192 --rows 32 -- --kv-cache-dtype fp8
    python -m benchmarks.long_context --shape demo --context 200 --rows 1 4

Random weights; greedy, EOS ignored, no prefix cache. A step's time is the distance between steps that brought a token
to every row, averaged over the steps of a run; medians of `--repeats` runs. The floor of a step is the bytes of the
weights, keys and values over 4.10 TB/s (what one H200 reads). KV is the memory of a row's blocks, beside that of one
without windows. Rows whose keys do not fit the cache are left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import msgspec

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.offline import READ_BYTES_PER_S
from benchmarks.saved import add_save_flag, saved

#: Steps that are averaged, in which all rows decode.
NUM_STEPS = 64
#: Fewest tokens of a prompt that a step computes, so that rows which began earlier do not end before the last begins.
CHUNK = 2048


def ttft_ms(work: Work, context: int, repeats: int) -> float:
    times = [work.run([workloads.prompt(930, request, context)], [1]) for request in range(repeats + 1)]
    return statistics.median(times[1:]) * 1e3


def step_ms(work: Work, context: int, rows: int, repeats: int) -> float:
    """Of `rows` rows, at `context` keys and a few more each."""
    prompts = [workloads.prompt(931, request, context) for request in range(rows)]
    num_tokens = NUM_STEPS + rows * (-(-context // CHUNK) + 1)
    return statistics.median(_mean_ms(work, prompts, num_tokens) for _ in range(repeats))


def _mean_ms(work: Work, prompts: list[tuple[int, ...]], num_tokens: int) -> float:
    work.run(prompts, [num_tokens] * len(prompts))
    together = [at for at, rows in zip(work.step_times_s, work.step_rows, strict=True) if rows == len(prompts)]
    return (together[-1] - together[0]) / (len(together) - 1) * 1e3


def floor_ms(work: Work, shape: str, context: int, rows: int) -> str:
    """A dash where the bandwidth of an H200 is not what limits."""
    if "H200" not in work.facts.device or shape not in workloads.SHAPES:
        return "–"
    ((kept, _),) = work.facts.kv.sections
    in_16_bits = msgspec.structs.replace(kept, dtype="bfloat16").token_bytes
    kv_bytes = workloads.kv_bytes(shape, [context] * rows) * kept.token_bytes / in_16_bits
    num_bytes = workloads.weight_bytes(shape) + kv_bytes
    return f"{num_bytes / READ_BYTES_PER_S * 1e3:.3f}"


def row_mb(work: Work, context: int) -> str:
    """Return megabytes of a row's blocks, and those if no layer had a window."""
    plan = work.facts.kv
    whole = -(-context // plan.block_size)
    kept = [min(whole, -(-group.window // plan.block_size) + 1) if group.window else whole for group in plan.groups]
    return " / ".join(f"{blocks * plan.block_bytes / 1e6:,.0f}" for blocks in (sum(kept), whole * len(kept)))


def that_fit(work: Work, context: int, all_rows: list[int]) -> Iterator[int]:
    slots = work.facts.num_blocks * work.facts.kv.block_size
    return (rows for rows in all_rows if rows * (context + CHUNK) <= slots)


def measure(shape: str, args: argparse.Namespace) -> None:
    max_len = max(args.context) + CHUNK
    with loaded(shape, args.flags, max_len) as work:
        print("\n| context | rows | first token ms | ms/step | floor ms | KV MB a row / without windows |")
        print("|--:|--:|--:|--:|--:|--:|")
        for context in args.context:
            for rows in that_fit(work, context, args.rows):
                first = f"{ttft_ms(work, context, args.repeats):.1f}" if rows == 1 else ""
                step = step_ms(work, context, rows, args.repeats)
                floor = floor_ms(work, shape, context, rows)
                print(f"| {context} | {rows} | {first} | {step:.3f} | {floor} | {row_mb(work, context)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["1b"], choices=[*workloads.SHAPES, "demo"])
    parser.add_argument("--context", nargs="*", type=int, default=[8192, 32000], help="tokens of a prompt")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    with saved(args.save):
        for shape in args.shape:
            measure(shape, args)


if __name__ == "__main__":
    main()
