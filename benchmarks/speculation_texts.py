"""The embedded model's own texts, one stream on a CPU: the time of a token with each drafter beside that without one.

    python -m benchmarks.speculation_texts [--drafters ngram draft eagle3] [--drafts 3 5] [--rounds 5] [--tokens 128]

Greedy, in one thread (OMP_NUM_THREADS=1 keeps it so). Runs without drafts and with take turns; what is printed are
medians of the rounds, and of their ratios. It is checked that all outputs are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from benchmarks.engine import Work, loaded
from benchmarks.saved import add_save_flag, saved
from photon_grpc import demo
from photon_grpc.core.batch import DRAFT_COUNTS
from photon_grpc.engine.scheduler.drafting import Drafting, FixedDrafting, NoDrafting

TEXTS = (
    "def fib(n):\n    ",
    "import os\nimport sys\n\n\ndef main() -> None:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "# Return the number of lines in a file.\ndef count_lines(path):\n",
    "for name in names:\n    if name in seen:\n",
)
DRAFTERS = {"ngram": "ngram", "draft": str(demo.DRAFT), "eagle3": str(demo.EAGLE3)}


def run(work: Work, drafting: Drafting, prompts: list[list[int]], tokens: int) -> tuple[float, int, list[list[int]]]:
    """Return the seconds behind the first tokens, the steps that those took, and the outputs, one after the other."""
    work.scheduler.drafting = drafting
    seconds, steps, outputs = 0.0, 0, []
    for prompt in prompts:
        begin_s = time.perf_counter()
        work.run([prompt], [tokens])
        seconds += time.perf_counter() - begin_s - work.first_s
        steps += len(work.step_rows) - 1
        outputs.append(next(iter(work.ids.values())))
    return seconds, steps, outputs


def measure(name: str, drafts: int, args: argparse.Namespace, prompts: list[list[int]]) -> str:
    """Return a row of the table."""
    flags = ["--device", args.device, "--max-num-seqs", "1", "--speculative-model", DRAFTERS[name]]
    flags += ["--num-speculative-tokens", str(drafts), "--speculation-control", "fixed"]
    plain, drafted, ratios, steps = [], [], [], 0
    # What `loaded` says of the model would stand within the table.
    with contextlib.redirect_stdout(sys.stderr), loaded("demo", flags) as work:
        # The first round warms up.
        for _ in range(1 + args.rounds):
            plain_s, _, expected = run(work, NoDrafting(), prompts, args.tokens)
            drafted_s, steps, found = run(work, FixedDrafting(drafts), prompts, args.tokens)
            assert found == expected, "an output differs"
            plain.append(plain_s)
            drafted.append(drafted_s)
            ratios.append(plain_s / drafted_s)
    count = len(prompts) * (args.tokens - 1)
    before_ms, after_ms = (1e3 * statistics.median(each[1:]) / count for each in (plain, drafted))
    ratio = statistics.median(ratios[1:])
    return f"| {name} | {drafts} | {count / steps:.2f} | {before_ms:.2f} | {after_ms:.2f} | {ratio:.2f} |"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5], choices=DRAFT_COUNTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every output")
    parser.add_argument("--device", default="cpu")
    add_save_flag(parser)
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    with saved(args.save):
        print("\n| drafter | drafts | tokens a step | ms a token, plain | with drafts | times as fast |")
        print("|---|--:|--:|--:|--:|--:|", flush=True)
        for name in args.drafters:
            for drafts in args.drafts:
                print(measure(name, drafts, args, prompts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
