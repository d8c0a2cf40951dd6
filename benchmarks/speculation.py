"""Steps that verify drafts: their time beside plain steps, and the time of a token at a given acceptance.

    python -m benchmarks.speculation [--shape 8b] [--rows 1 16 64] [--drafts 1 3 7] [--acceptance 1 0.7 0] [--ngram]
        [--with eagle3 | --with 1b]

Every row has a random prompt and greedy output. Outputs are first made without drafts; then a drafter that knows them
is right as often as `--acceptance` says, so that steps cost what they cost with a real drafter, less the drafter.
`--with eagle3` lets an EAGLE-3 head with random weights draft as well, and `--with SHAPE` a draft model: its drafts are
then replaced, and its cost is part of the steps. `--ngram` drafts by prompt lookup instead, whose cost is measured with
it. It is checked that all outputs are equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.known_answers import Key, KnownAnswers
from benchmarks.saved import add_save_flag, saved
from benchmarks.shapes import eagle3_config
from photon_grpc.engine.scheduler.drafting import FixedDrafting, NoDrafting
from photon_grpc.runner.model_runner import ModelRunner

MAX_DRAFTS = 7


class Measured:
    """One run: milliseconds of a step, tokens of a row and step, milliseconds of a token of a row."""

    def __init__(self, work: Work, num_rows: int) -> None:
        gaps = [1e3 * (after - before) for before, after in pairwise(work.step_times_s)]
        # Prompts come first, and at the end rows are missing.
        middle = [(gap, tokens) for gap, tokens in zip(gaps, work.step_rows[1:], strict=True) if tokens >= num_rows][
            2:-2
        ]
        self.step_ms = statistics.median(gap for gap, _ in middle)
        self.tokens = statistics.mean(tokens for _, tokens in middle) / num_rows
        self.token_ms = self.step_ms / self.tokens


def row(name: str, found: Measured, plain: Measured) -> str:
    return (
        f"| {name} | {found.step_ms:.3f} | {found.step_ms / plain.step_ms:.3f} | {found.tokens:.2f} "
        f"| {found.token_ms:.3f} | {plain.token_ms / found.token_ms:.2f} |"
    )


def measure(work: Work, args: argparse.Namespace, num_rows: int) -> None:
    runner = work.runner
    assert isinstance(runner, ModelRunner)
    rng = random.Random(num_rows)
    vocab_size = work.facts.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(args.prompt)] for _ in range(num_rows)]
    lengths = [args.tokens] * num_rows
    scheduler = work.scheduler
    scheduler.drafting = NoDrafting()
    for _ in range(2):
        work.run(prompts, lengths)
        expected = list(work.ids.values())
    plain = Measured(work, num_rows)
    print(row(f"{num_rows} | 0 | –", plain, plain), flush=True)
    known = {Key(tuple(prompt), 0, 0): ids for prompt, ids in zip(prompts, expected, strict=True)}
    for drafts in args.drafts:
        scheduler.drafting = FixedDrafting(drafts)
        for acceptance in args.acceptance:
            drafter = KnownAnswers(runner, known, acceptance, is_dear=bool(args.beside))
            try:
                report(work, (prompts, lengths, expected), f"{num_rows} | {drafts} | {acceptance:g}", plain)
            finally:
                drafter.restore()
        if args.ngram:
            report(work, (prompts, lengths, expected), f"{num_rows} | {drafts} | n-gram", plain)
    scheduler.drafting = NoDrafting()


def report(
    work: Work,
    asked: tuple[list[list[int]], list[int], list[list[int]]],
    name: str,
    plain: Measured,
) -> None:
    prompts, lengths, expected = asked
    work.run(prompts, lengths)
    differ = sum(one != other for one, other in zip(work.ids.values(), expected, strict=True))
    print(
        row(name, Measured(work, len(prompts)), plain) + (f" **{differ} outputs differ**" if differ else ""), flush=True
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[1.0, 0.7, 0.0])
    parser.add_argument("--ngram", action="store_true", help="draft by prompt lookup, too")
    parser.add_argument(
        "--with", dest="beside", metavar="SHAPE", default="", help="what drafts as well: eagle3, a shape"
    )
    parser.add_argument("--prompt", type=int, default=200, help="tokens of every prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every output")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    return parser.parse_args(argv)


def drafter_dir(shape: str, beside: str, directory: Path) -> str:
    """Write the directory of what drafts, without weights; return its name, or ngram for nothing."""
    if not beside:
        return "ngram"
    served = workloads.SHAPES[shape]
    if beside == "eagle3":
        config = eagle3_config(served)
    else:
        config = workloads.SHAPES[beside] | {"vocab_size": served["vocab_size"]}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as directory:
        return run(args, drafter_dir(args.shape, args.beside, Path(directory)))


def run(args: argparse.Namespace, drafter: str) -> int:
    flags = ["--speculative-model", drafter, "--num-speculative-tokens", str(MAX_DRAFTS)]
    flags += ["--speculation-control", "fixed", "--max-num-seqs", str(max(args.rows)), *args.flags]
    with saved(args.save), loaded(args.shape, flags) as work:
        print("\n| rows | drafts | right | ms a step | of a plain one | tokens a row | ms a token | times as fast |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|")
        for num_rows in args.rows:
            measure(work, args, num_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
