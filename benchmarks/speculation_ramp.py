"""Drafts as many as pay, while the load rises and falls: tokens a second beside those of a server without a drafter.

    python -m benchmarks.speculation_ramp [--shape 1b] [--streams 1 64 256 1] [--acceptance 0 0.7] [--rounds 3]
        [--with eagle3 | --with SHAPE]

A ramp is one phase for each number of streams: as many greedy requests at once, until all have ended. Two servers in
one process take turns with every phase: one that was started without drafts, and one that drafts; what its choice of
drafts has learnt stays from phase to phase. The drafter knows the answers and is right as often as `--acceptance` says;
`--with` lets an EAGLE-3 head or a draft model with random weights draft as well, for what that costs. It is counted how
many answers differ. Printed first: a step without drafts on either server, which is what a drafter costs that drafts
nothing; then for each phase: the median of the rounds' tokens a second, the median ratio and the least of a round.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine import Work, loaded
from benchmarks.known_answers import Key, KnownAnswers
from benchmarks.saved import add_save_flag, saved
from benchmarks.speculation import drafter_dir
from photon_grpc.core.batch import DRAFT_COUNTS
from photon_grpc.engine.scheduler.drafting import Drafting, NoDrafting
from photon_grpc.runner.model_runner import ModelRunner

Prompts = list[list[int]]


class Pair(NamedTuple):
    """Two servers of the same model."""

    off: Work
    drafting: Work


class Phase(NamedTuple):
    """Tokens a second of the two, and the answers that differ."""

    off: float
    drafting: float
    num_different: int

    @property
    def ratio(self) -> float:
        return self.drafting / self.off


def phase(pair: Pair, prompts: Prompts, tokens: int) -> Phase:
    rates, answers = [], []
    for work in pair:
        begin_s = time.perf_counter()
        work.run(prompts, [tokens] * len(prompts))
        rates.append(len(prompts) * tokens / (time.perf_counter() - begin_s))
        answers.append(list(work.ids.values()))
    return Phase(*rates, sum(one != other for one, other in zip(*answers, strict=True)))


def idle(pair: Pair, prompts: Prompts, streams: Sequence[int], tokens: int, rounds: int) -> None:
    """Print what a step without drafts takes on either server."""
    print("\n| streams | ms a step, no drafter | with one that drafts nothing | ratio |\n|--:|--:|--:|--:|")
    pair.drafting.scheduler.drafting = NoDrafting()
    for count in dict.fromkeys(streams):
        found: list[list[float]] = [[], []]
        for _ in range(1 + rounds):
            for times, work in zip(found, pair, strict=True):
                work.run(prompts[:count], [tokens] * count)
                gaps = [1e3 * (after - before) for before, after in pairwise(work.step_times_s)]
                times.append(statistics.median(gaps[len(gaps) // 4 :]))
        off, held = (statistics.median(times[1:]) for times in found)
        print(f"| {count} | {off:.3f} | {held:.3f} | {held / off:.4f} |", flush=True)


def measure(pair: Pair, args: argparse.Namespace, prompts: Prompts, acceptance: float, fresh: Drafting) -> None:
    runner = pair.drafting.runner
    assert isinstance(runner, ModelRunner)
    pair.off.run(prompts, [args.tokens] * len(prompts))
    answers = {Key(tuple(prompt), 0, 0): ids for prompt, ids in zip(prompts, pair.off.ids.values(), strict=True)}
    drafter = KnownAnswers(runner, answers, acceptance, is_dear=bool(args.beside))
    pair.drafting.scheduler.drafting = copy.deepcopy(fresh)
    rounds = []
    try:
        # The first ramp warms up, and teaches the choice what steps cost.
        for tokens in (args.first_tokens or args.tokens, *[args.tokens] * args.rounds):
            rounds.append([phase(pair, prompts[:count], tokens) for count in args.streams])
            print("round:", *(f"{each.ratio:.3f}" for each in rounds[-1]), flush=True)
    finally:
        drafter.restore()
    for at, count in enumerate(args.streams):
        found = [each[at] for each in rounds[1:]] or [rounds[0][at]]
        off, drafting, ratio = (
            statistics.median(values)
            for values in ([e.off for e in found], [e.drafting for e in found], [e.ratio for e in found])
        )
        print(
            f"| {acceptance:g} | {count} | {off:,.0f} | {drafting:,.0f} | {ratio:.3f} "
            f"| {min(each.ratio for each in found):.3f} | {sum(each[at].num_different for each in rounds)} |",
            flush=True,
        )


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
    parser.add_argument("--first-tokens", type=int, default=0, help="tokens of every answer of the first ramp")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as directory:
        return run(args, drafter_dir(args.shape, args.beside, Path(directory)))


def run(args: argparse.Namespace, drafter: str) -> int:
    most, rng = max(args.streams), random.Random(0)
    flags = ["--max-num-seqs", str(most), *args.flags]
    drafts = ["--speculative-model", drafter, "--num-speculative-tokens", str(args.drafts)]
    with saved(args.save), loaded(args.shape, flags) as off, loaded(args.shape, [*drafts, *flags]) as drafting:
        vocab_size = off.facts.vocab_size
        prompts = [[rng.randrange(vocab_size) for _ in range(args.prompt)] for _ in range(most)]
        pair = Pair(off, drafting)
        # What was never asked has learnt nothing.
        fresh = drafting.scheduler.drafting
        idle(pair, prompts, args.streams, min(48, args.tokens), args.rounds)
        print("\n| right | streams | tokens/s, no drafter | with drafts | ratio | least of a round | answers differ |")
        print("|--:|--:|--:|--:|--:|--:|--:|")
        for acceptance in args.acceptance:
            measure(pair, args, prompts, acceptance, fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
