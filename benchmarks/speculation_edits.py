"""Prompt lookup where a file is rewritten: real edits, with the answers forced upon a model that could not give them.

    python -m benchmarks.speculation_edits [--shape demo] [--traces 12] [--drafts 7] [--repository DIR]
    python -m benchmarks.speculation_edits --write FILE    # only writes the traces, for a machine without git
    python -m benchmarks.speculation_edits --read FILE

A trace is a commit of a repository: the prompt holds a Python file before it, the answer is the file after it. No
weights here rewrite files, so each sampled id is replaced by that of the answer, behind the sampling and before drafts
are compared; everything else is computed as ever. Printed for each trace: tokens of the answer, lines changed, tokens a
step, and the time of a token without drafts and with. Ids are those of the embedded model's tokenizer, whose 4,096
tokens are shorter than those of larger models.
"""

from __future__ import annotations

import argparse
import difflib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from benchmarks.engine import Work, loaded
from benchmarks.saved import add_save_flag, saved
from benchmarks.speculation import Measured
from photon_grpc import demo
from photon_grpc.engine.scheduler.drafting import FixedDrafting, NoDrafting
from photon_grpc.runner import sampler
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.sampler import SampledTokens, SamplingLevel

_ASK = "Rewrite this file.\n\n{}\n\nThe new file:\n\n"


class Trace(NamedTuple):
    """A file and what became of it."""

    name: str
    prompt: list[int]
    answer: list[int]
    #: The share of its lines that are not in the old file.
    changed: float


class Forced:
    """The answers that are sampled instead of the model's own ids, on the device."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self._size = num_slots, max_len
        self.ids: torch.Tensor | None = None
        self._sample = sampler.Sampler.__call__

    def __enter__(self) -> Forced:
        sample, forced = self._sample, self

        def replaced(
            own: sampler.Sampler,
            hidden: torch.Tensor,
            slots: torch.Tensor,
            context_len: torch.Tensor,
            level: SamplingLevel,
        ) -> SampledTokens:
            found = sample(own, hidden, slots, context_len, level)
            if forced.ids is None:
                forced.ids = torch.zeros(forced._size, dtype=torch.int64, device=slots.device)
            at = context_len.long().clamp(max=forced._size[1] - 1)
            return found._replace(ids=forced.ids[slots, at])

        # Before graphs are captured, which hold what they call.
        sampler.Sampler.__call__ = replaced  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        sampler.Sampler.__call__ = self._sample  # type: ignore[method-assign]

    @torch.inference_mode()
    def answer(self, trace: Trace) -> None:
        """Force this answer upon every slot."""
        assert self.ids is not None
        ids = torch.tensor([*trace.prompt, *trace.answer], device=self.ids.device)
        self.ids[:, : len(ids)] = ids


def git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", repository, *words], capture_output=True, text=True, check=True).stdout


def edits(repository: Path) -> Iterator[tuple[str, str, str]]:
    """Return (name, before, after) of the Python files that commits changed, newest first, one of each file."""
    seen: set[str] = set()
    for commit in git(repository, "log", "--no-merges", "--format=%H").split():
        changes = git(repository, "diff-tree", "--no-commit-id", "-r", "--diff-filter=M", "--name-only", commit)
        for name in changes.split("\n"):
            if not name.endswith(".py") or name in seen:
                continue
            seen.add(name)
            try:
                yield name, git(repository, "show", f"{commit}~1:{name}"), git(repository, "show", f"{commit}:{name}")
            except (subprocess.CalledProcessError, UnicodeDecodeError):
                continue


def traces(repository: Path, count: int, max_len: int) -> list[Trace]:
    """Return edits that fit into the context and change more than a line or two, and less than half."""
    tokenizer = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    found: list[Trace] = []
    for name, before, after in edits(repository):
        old, new = before.splitlines(), after.splitlines()
        same = sum(
            block.size for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        )
        changed = 1 - same / max(len(new), 1)
        prompt = tokenizer.encode(_ASK.format(before)).ids
        answer = tokenizer.encode(after, add_special_tokens=False).ids
        if len(answer) >= 300 and 0.01 < changed < 0.5 and len(prompt) + len(answer) < max_len - 16:
            found.append(Trace(name, prompt, answer, changed))
        if len(found) == count:
            break
    return found


def measure(work: Work, forced: Forced, trace: Trace, drafts: int) -> tuple[Measured, Measured]:
    """Return a run without drafts, and one with."""
    found = []
    forced.answer(trace)
    for drafting in (NoDrafting(), FixedDrafting(drafts)):
        work.scheduler.drafting = drafting
        work.run([trace.prompt], [len(trace.answer)])
        assert next(iter(work.ids.values())) == trace.answer
        found.append(Measured(work, 1))
    return found[0], found[1]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="demo")
    parser.add_argument("--traces", type=int, default=12)
    parser.add_argument("--drafts", type=int, default=7, choices=(1, 3, 5, 7))
    parser.add_argument("--repository", type=Path, default=Path(__file__).parent, help="whose commits are replayed")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the traces as JSON, and nothing else")
    parser.add_argument("--read", type=Path, metavar="FILE", help="read the traces from such a file")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    if args.read:
        many = [Trace(*each) for each in json.loads(args.read.read_text(encoding="utf-8"))[: args.traces]]
    else:
        many = traces(args.repository, args.traces, max_len=4096)
    if args.write:
        args.write.write_text(json.dumps(many), encoding="utf-8")
        return 0
    if not many:
        print(f"{args.repository} has no commits with edits that fit", file=sys.stderr)
        return 1
    flags = ["--speculative-model", "ngram", "--num-speculative-tokens", str(args.drafts), "--max-num-seqs", "2"]
    flags += ["--speculation-control", "fixed", "--max-model-len", "4096", *args.flags]
    with saved(args.save), Forced(3, 4096) as forced, loaded(args.shape, flags, 4096) as work:
        assert isinstance(work.runner, ModelRunner)
        print("\n| file | tokens | lines changed | tokens a step | ms a token, plain | with drafts | times as fast |")
        print("|---|--:|--:|--:|--:|--:|--:|")
        steps, times = [], []
        for trace in many:
            plain, drafted = measure(work, forced, trace, args.drafts)
            steps.append(drafted.tokens)
            times.append(plain.token_ms / drafted.token_ms)
            print(
                f"| {trace.name} | {len(trace.answer)} | {trace.changed:.0%} | {drafted.tokens:.2f} "
                f"| {plain.token_ms:.3f} | {drafted.token_ms:.3f} | {times[-1]:.2f} |",
                flush=True,
            )
        print(f"\nmedian: {statistics.median(steps):.2f} tokens a step, {statistics.median(times):.2f} times as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
