"""Drafts as many as pay, while the load rises and falls: tokens a second beside those without drafts.

    python -m benchmarks.speculation_ramp [--shape 1b] [--streams 1 64 256 1] [--acceptance 0 0.7] [--rounds 3]
        [--with eagle3 | --with SHAPE]

A ramp is one phase for each number of streams: as many greedy requests at once, until all have ended. Ramps without
drafts and with take turns, in one process; what the choice of drafts has learnt stays from phase to phase. The drafter
knows the answers and is right as often as `--acceptance` says; `--with` lets an EAGLE-3 head or a draft model with
random weights draft as well, for what that costs. Printed for each phase: the median of the rounds' tokens a second,
and the least ratio of a round to the one without drafts before it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine import Work, loaded
from benchmarks.known_answers import Key, KnownAnswers
from benchmarks.saved import add_save_flag, saved
from benchmarks.speculation import drafter_dir
from photon_grpc.core.batch import DRAFT_COUNTS
from photon_grpc.engine.scheduler.adaptive_drafting import AdaptiveDrafting
from photon_grpc.engine.scheduler.drafting import Drafting, NoDrafting
from photon_grpc.runner.model_runner import ModelRunner


def ramp(work: Work, drafting: Drafting, prompts: list[list[int]], streams: Sequence[int], tokens: int) -> list[float]:
    """Return the tokens a second of every phase."""
    work.scheduler.drafting = drafting
    found = []
    for count in streams:
        begin_s = time.perf_counter()
        work.run(prompts[:count], [tokens] * count)
        found.append(count * tokens / (time.perf_counter() - begin_s))
    return found


def measure(work: Work, args: argparse.Namespace, prompts: list[list[int]], acceptance: float) -> None:
    assert isinstance(work.runner, ModelRunner)
    work.run(prompts, [args.tokens] * len(prompts))
    answers = {Key(tuple(prompt), 0, 0): ids for prompt, ids in zip(prompts, work.ids.values(), strict=True)}
    drafter = KnownAnswers(work.runner, answers, acceptance, is_dear=bool(args.beside))
    drafting = AdaptiveDrafting(tuple(count for count in DRAFT_COUNTS if count <= args.drafts))
    rounds = []
    try:
        # The first ramps warm up, and teach the choice what steps cost.
        for _ in range(1 + args.rounds):
            shared = work, prompts, args.streams, args.tokens
            plain = ramp(shared[0], NoDrafting(), *shared[1:])
            rounds.append((plain, ramp(shared[0], drafting, *shared[1:])))
    finally:
        drafter.restore()
    for phase, count in enumerate(args.streams):
        plain, drafted = ([each[side][phase] for each in rounds[1:]] for side in (0, 1))
        least = min(one / other for one, other in zip(drafted, plain, strict=True))
        told = statistics.median(plain), statistics.median(drafted)
        print(f"| {acceptance:g} | {count} | {told[0]:,.0f} | {told[1]:,.0f} | {told[1] / told[0]:.3f} | {least:.3f} |")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 1])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--drafts", type=int, default=3, choices=DRAFT_COUNTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--with", dest="beside", metavar="SHAPE", default="", help="what drafts as well: eagle3, a shape"
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of every answer")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as directory:
        return run(args, drafter_dir(args.shape, args.beside, Path(directory)))


def run(args: argparse.Namespace, drafter: str) -> int:
    most, rng = max(args.streams), random.Random(0)
    flags = ["--speculative-model", drafter, "--num-speculative-tokens", str(args.drafts), "--max-num-seqs", str(most)]
    with saved(args.save), loaded(args.shape, [*flags, *args.flags]) as work:
        vocab_size = work.facts.vocab_size
        prompts = [[rng.randrange(vocab_size) for _ in range(args.prompt)] for _ in range(most)]
        print("\n| right | streams | tokens/s, plain | with drafts | ratio | least of a round |")
        print("|--:|--:|--:|--:|--:|--:|")
        for acceptance in args.acceptance:
            measure(work, args, prompts, acceptance)
    return 0


if __name__ == "__main__":
    sys.exit(main())
