"""Measure what the options of its rows cost a decode step: milliseconds a step of the loaded runner, without engine
or wire.

    python -m benchmarks.step_options [--shape 1b] [--rows 1 8 64 256] [--steps 48] [--rounds 5] [-- FLAGS OF serve]

All rows ask for the same. The variants take turns in every round, and the median of the rounds is told. Steps overlap
as the engine lets them: one is launched before the one before it is read, and reading unpacks nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from msgspec import structs

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.saved import add_save_flag, saved
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.core.scores import NO_SCORES, RECORD, ScoreParams

GREEDY, DRAWN, TOP_P = SamplingParams(0.0), SamplingParams(0.8, seed=1), SamplingParams(0.8, top_p=0.95, seed=1)
# Logits of dummy weights are normal with deviation 0.9 (0.02 · √hidden_size). Over 0.8 such rows are nearly flat; over
# 0.3 they are as wide as a trained model's.
WIDE = SamplingParams(0.3, top_p=0.95, seed=1)
VARIANTS = {
    "greedy": (GREEDY, NO_SCORES),
    "greedy, logprobs 0": (GREEDY, ScoreParams(logprobs=0)),
    "greedy, logprobs 5": (GREEDY, ScoreParams(logprobs=5)),
    "greedy, logprobs 20": (GREEDY, ScoreParams(logprobs=20)),
    "temperature": (DRAWN, NO_SCORES),
    "temperature, logprobs 5": (DRAWN, ScoreParams(logprobs=5)),
    "temperature, top_p of flat rows": (TOP_P, NO_SCORES),
    "temperature, top_p of wide rows": (WIDE, NO_SCORES),
    "temperature, top_k 50 and top_p of wide rows": (structs.replace(WIDE, top_k=50), NO_SCORES),
    "top_p": (TOP_P, NO_SCORES),
    "top_p, logprobs 5": (TOP_P, ScoreParams(logprobs=5)),
}
PROMPT_TOKENS = 128


def step_ms(work: Work, num_rows: int, num_steps: int, sampling: SamplingParams, scores: ScoreParams) -> float:
    """Of decode steps behind prompts that `prefill` has computed."""
    runner, slots, ones = work.runner, tuple(range(1, num_rows + 1)), (1,) * num_rows
    admissions = [row(work, slot, num_steps, PROMPT_TOKENS - 1) for slot in slots]
    asking = tuple(structs.replace(admission, sampling=sampling, scores=scores) for admission in admissions)
    runner.submit(Batch(0, slots, ones, ones, left=slots, admissions=asking)).result()
    # The first replay of a shape and level is not measured.
    pending = runner.submit(Batch(1, slots, ones, ones))
    start_s = 0.0
    for step in range(2, num_steps + 2):
        following = runner.submit(Batch(step, slots, ones, ones))
        pending.result()
        start_s = start_s or time.perf_counter()
        pending = following
    output = pending.result()
    elapsed_s = time.perf_counter() - start_s
    expected = dict.fromkeys(range(num_rows), scores.records * RECORD.size) if scores.records else {}
    if output.faults or {row: len(records) for row, records in output.scores.items()} != expected:
        raise SystemExit(f"{num_rows} rows: a step failed, or gave other scores than it was asked for")
    return elapsed_s / num_steps * 1e3


def prefill(work: Work, num_rows: int, num_steps: int) -> None:
    """Keys of all prompts, a few prompts at a time."""
    for first in range(1, num_rows + 1, 16):
        slots = tuple(range(first, min(first + 16, num_rows + 1)))
        counts, admissions = (PROMPT_TOKENS,) * len(slots), tuple(row(work, slot, num_steps, 0) for slot in slots)
        work.runner.submit(Batch(0, slots, counts, (1,) * len(slots), left=slots, admissions=admissions)).result()


def row(work: Work, slot: int, num_steps: int, num_computed: int) -> Admission:
    """In blocks of its own."""
    num_columns = work.runner.kv.columns(PROMPT_TOKENS + num_steps + 3)
    blocks = tuple(range(1 + (slot - 1) * num_columns, 1 + slot * num_columns))
    ids = tuple(token % work.facts.vocab_size for token in workloads.prompt(1, slot, PROMPT_TOKENS))
    return Admission(slot, ids, PROMPT_TOKENS, num_computed, (blocks,), GREEDY)


def table(args: argparse.Namespace) -> None:
    flags = ["--max-num-seqs", str(max(args.rows)), *args.flags]
    with loaded(args.shape, flags) as work, torch.inference_mode():
        print(f"\n| ms a step | {' | '.join(map(str, args.rows))} |\n|---|{'--:|' * len(args.rows)}")
        medians: dict[str, dict[int, float]] = {name: {} for name in VARIANTS}
        for rows in args.rows:
            prefill(work, rows, args.steps)
            turns = [
                [step_ms(work, rows, args.steps, *variant) for variant in VARIANTS.values()]
                for _ in range(args.rounds + 1)
            ]
            for number, name in enumerate(VARIANTS):
                medians[name][rows] = statistics.median(turn[number] for turn in turns[1:])
        for name, by_rows in medians.items():
            base = medians[name.split(",")[0]]
            cells = (f"{ms:.3f}" + ("" if base is by_rows else f" ({ms - base[rows]:+.3f}, {ms / base[rows] - 1:+.1%})")
                     for rows, ms in by_rows.items())  # fmt: skip
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=[*workloads.SHAPES, "demo"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    with saved(args.save):
        table(args)


if __name__ == "__main__":
    main()
