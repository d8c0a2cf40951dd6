"""Measure what the options of its rows cost a decode step: milliseconds a step of the loaded runner, without engine
or wire.

    python -m benchmarks.step_options [--shape 1b] [--rows 1 8 64 256] [--steps 48] [--rounds 5] [-- FLAGS OF serve]

All rows ask for the same. The variants take turns in every round, and the median of the rounds is told. Steps overlap
as the engine lets them: one is launched before the one before it is read, and reading unpacks nothing. A step with
masks counts what the engine does for them: matchers move on, masks are filled while the device computes, and are
copied. An output that completes its schema begins it again. `masks of a schema`: outputs follow texts such as a trained
model writes; the schema's strings have a `maxLength` of 40, or none. `what is drawn`: what random weights draw, which
runs every string to the end that the schema sets it. `masks that allow everything` are made by nobody.
Everything: filters, penalties, biases, scores, masks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import torch
from msgspec import structs

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.masked_rows import DrawnMasks, NoMasks, OpenMasks, UnboundedMasks, WrittenMasks
from benchmarks.saved import add_save_flag, saved
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.logprobs import NO_LOGPROBS, RECORD, LogprobParams
from photon_grpc.core.request import SamplingParams

GREEDY, DRAWN, TOP_P = SamplingParams(0.0), SamplingParams(0.8, seed=1), SamplingParams(0.8, top_p=0.95, seed=1)
# Logits of dummy weights are normal with deviation 0.9 (0.02 · √hidden_size). Over 0.8 such rows are nearly flat; over
# 0.3 they are as wide as a trained model's.
WIDE = SamplingParams(0.3, top_p=0.95, seed=1)
#: 16 biases; repetition, presence and frequency penalties.
PROCESSED = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": tuple((7 * at, 0.5) for at in range(16)),
}


class Variant(NamedTuple):
    """Asked for by every row."""

    sampling: SamplingParams
    logprobs: LogprobParams = NO_LOGPROBS
    masks: type[NoMasks] = NoMasks


VARIANTS = {
    "greedy": Variant(GREEDY),
    "greedy, logprobs 0": Variant(GREEDY, LogprobParams(num_logprobs=0)),
    "greedy, logprobs 5": Variant(GREEDY, LogprobParams(num_logprobs=5)),
    "greedy, logprobs 20": Variant(GREEDY, LogprobParams(num_logprobs=20)),
    "greedy, penalties and biases": Variant(structs.replace(GREEDY, **PROCESSED)),
    "greedy, masks that allow everything": Variant(GREEDY, masks=OpenMasks),
    "greedy, masks of a schema": Variant(GREEDY, masks=WrittenMasks),
    "greedy, masks of a schema without maxLength": Variant(GREEDY, masks=UnboundedMasks),
    "greedy, masks of a schema, what is drawn": Variant(GREEDY, masks=DrawnMasks),
    "temperature": Variant(DRAWN),
    "temperature, logprobs 5": Variant(DRAWN, LogprobParams(num_logprobs=5)),
    "temperature, penalties and biases": Variant(structs.replace(DRAWN, **PROCESSED)),
    "temperature, masks of a schema": Variant(DRAWN, masks=WrittenMasks),
    "temperature, masks of a schema, what is drawn": Variant(DRAWN, masks=DrawnMasks),
    "temperature, top_p of flat rows": Variant(TOP_P),
    "temperature, top_p of wide rows": Variant(WIDE),
    "temperature, top_k 50 and top_p of wide rows": Variant(structs.replace(WIDE, top_k=50)),
    "temperature, everything": Variant(
        structs.replace(DRAWN, top_k=50, top_p=0.95, min_p=0.01, **PROCESSED),
        LogprobParams(num_logprobs=5),
        masks=WrittenMasks,
    ),
    "top_p": Variant(TOP_P),
    "top_p, logprobs 5": Variant(TOP_P, LogprobParams(num_logprobs=5)),
}
PROMPT_TOKENS = 128


def step_ms(work: Work, num_rows: int, num_steps: int, variant: Variant, masks: NoMasks) -> float:
    """Of decode steps behind prompts that `prefill` has computed."""
    runner, slots, ones = work.runner, tuple(range(1, num_rows + 1)), (1,) * num_rows
    sampling, scores = variant.sampling, variant.logprobs
    admissions = [row(work, slot, num_steps, PROMPT_TOKENS - 1) for slot in slots]
    asking = tuple(structs.replace(admission, sampling=sampling, logprobs=scores) for admission in admissions)
    first = Batch(0, slots, ones, ones, left=slots, admissions=asking, masked=masks.masked)
    pending = runner.submit(first)
    masks.give(first, pending)
    start_s = 0.0
    # The first replay of a shape and level is not measured.
    for step in range(1, num_steps + 2):
        batch = Batch(step, slots, ones, ones, masked=masks.masked)
        following = runner.submit(batch)
        masks.read(pending)
        start_s = time.perf_counter() if step == 2 else start_s
        masks.give(batch, following)
        pending = following
    output = masks.read(pending)
    elapsed_s = time.perf_counter() - start_s
    expected = dict.fromkeys(range(num_rows), scores.num_records * RECORD.size) if scores.num_records else {}
    if output.faults or {row: len(records) for row, records in output.logprobs.items()} != expected:
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


def chosen(parts: list[str]) -> dict[str, Variant]:
    """Variants whose names contain one of these, and those that they are compared with; all where none is given."""
    wanted = {name for name in VARIANTS if any(part in name for part in parts or [""])}
    wanted |= {name.split(",")[0] for name in wanted}
    return {name: variant for name, variant in VARIANTS.items() if name in wanted}


def table(args: argparse.Namespace) -> None:
    flags = ["--max-num-seqs", str(max(args.rows)), *args.flags]
    with loaded(args.shape, flags, has_tokenizer=True) as work, torch.inference_mode():
        print(f"\n| ms a step | {' | '.join(map(str, args.rows))} |\n|---|{'--:|' * len(args.rows)}")
        variants = chosen(args.only)
        medians: dict[str, dict[int, float]] = {name: {} for name in variants}
        for rows in args.rows:
            prefill(work, rows, args.steps)
            masks = {kind: kind(work, rows) for kind in {variant.masks for variant in variants.values()}}
            turns = [
                [step_ms(work, rows, args.steps, variant, masks[variant.masks]) for variant in variants.values()]
                for _ in range(args.rounds + 1)
            ]
            for number, name in enumerate(variants):
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
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="PART", help="variants whose names contain one of these"
    )
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    with saved(args.save):
        table(args)


if __name__ == "__main__":
    main()
