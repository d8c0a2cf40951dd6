"""The speed of two source trees in turns: what one commit costs against another, on the same device in one run.

    git archive BEFORE photon_grpc benchmarks | tar -x -C /tmp/before
    python -m benchmarks.alternate --before /tmp/before --shape 1b 8b [--rounds 5] [--joules 4] [-- FLAGS OF serve]

A process for each tree holds the model, with random weights; this one asks them for one measurement after the other, in
turns, while the other waits. Medians of so many rounds: ms a decode step (128 tokens in; what 96 out take longer than
32), tokens a second of prefill of 32 × 2,048, ms to the first token of one prompt, tokens a second of the first part of
mixed-512, and with --joules, for so many seconds, those a token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DECODE_ROWS = (1, 8, 16, 64, 128, 256)
PROMPTS = (128, 512, 2048, 8192, 32_000)
_MAX_LEN = 32_768
#: Begins a line that answers.
_MARK = "="


class Side:
    """The process of one tree."""

    def __init__(self, tree: Path, shape: str, flags: Sequence[str]) -> None:
        command = [sys.executable, "-P", __file__, "--worker", "--shape", shape, "--", *flags]
        environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, cwd=tree, text=True, **pipes)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :])
        raise SystemExit(f"a process ended with {self._process.wait()}")

    def ask(self, what: str, size: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, size]) + "\n")
        self._process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def worker(shape: str, flags: Sequence[str]) -> None:
    """Measure what is asked for on standard input, with the code of the tree that is imported."""
    from benchmarks import offline, workloads
    from benchmarks.engine import loaded

    def decode(batch: int) -> float:
        prompts = [workloads.prompt(900, request, 128) for request in range(batch)]
        long, short = (work.run(prompts, [count] * batch) for count in (96, 32))
        return (long - short) / 64 * 1e3

    def prefill(length: int) -> float:
        return 32 * length / work.run([workloads.prompt(901, request, length) for request in range(32)], [1] * 32)

    def first(length: int) -> float:
        # Half of a short one's time is the host's, which varies most.
        repeats = 15 if length <= 512 else 7 if length <= 2048 else 1
        return statistics.median(work.run([workloads.prompt(902, i, length)], [1]) for i in range(repeats)) * 1e3

    def mixed(percent: int) -> float:
        seconds, num_tokens = offline.mixed_s(work, percent / 100)
        return num_tokens / seconds

    def busy(batch: int) -> float:
        """Decode 256 tokens each; return the tokens."""
        work.run([workloads.prompt(930, request, 128) for request in range(batch)], [256] * batch)
        return 256.0 * batch

    works = {work.__name__: work for work in (decode, prefill, first, mixed, busy)}
    with loaded(shape, flags, _MAX_LEN if shape != "demo" else 0) as work:
        print(f"{_MARK}{json.dumps(work.facts.device)}", flush=True)
        for line in sys.stdin:
            what, size = json.loads(line)
            print(f"{_MARK}{json.dumps(works[what](size))}", flush=True)


def in_turns(sides: Sequence[Side], rounds: int, what: str, size: int) -> list[float]:
    """Return the median of each side."""
    found = [[side.ask(what, size) for side in sides] for _ in range(rounds)]
    return [statistics.median(of_side) for of_side in zip(*found, strict=True)]


def joules(sides: Sequence[Side], batch: int, seconds: float, meter: Callable[[], float]) -> list[float]:
    """Return the joules a token of each side."""
    found = []
    for side in sides:
        begun_s, begun_j, num_tokens = time.perf_counter(), meter(), 0.0
        while time.perf_counter() - begun_s < seconds:
            num_tokens += side.ask("busy", batch)
        found.append((meter() - begun_j) / num_tokens)
    return found


def table(shape: str, args: argparse.Namespace, meter: Callable[[], float] | None) -> None:
    sides = [Side(tree.resolve(), shape, args.flags) for tree in (args.before, args.after)]
    device, _ = (side.answer() for side in sides)
    print(f"\n## {shape} on {device}\n", flush=True)
    print("| | before | after | |\n|---|--:|--:|--:|")
    try:
        for name, what, sizes in (
            ("decode, ms a step, {} rows", "decode", args.batch),
            ("prefill 32 × {}, tok/s", "prefill", args.prefill),
            ("first token after {}, ms", "first", args.first),
            ("the first {} % of mixed-512, tok/s", "mixed", args.mixed),
        ):
            for size in sizes:
                show(name.format(f"{size:,}"), in_turns(sides, args.rounds, what, size))
        for batch in args.energy if meter else ():
            show(f"J a token, {batch} rows", joules(sides, batch, args.joules, meter))
    finally:
        for side in sides:
            side.close()


def show(name: str, found: Sequence[float]) -> None:
    before, after = found
    digits = 0 if before >= 1000 else 3
    print(f"| {name} | {before:,.{digits}f} | {after:,.{digits}f} | {after / before - 1:+.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a directory with photon_grpc and benchmarks")
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--shape", nargs="+", default=["1b"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", nargs="*", type=int, default=DECODE_ROWS)
    parser.add_argument("--prefill", nargs="*", type=int, default=[2048])
    parser.add_argument("--first", nargs="*", type=int, default=PROMPTS)
    parser.add_argument("--mixed", nargs="*", type=int, default=[], metavar="PERCENT")
    parser.add_argument("--energy", nargs="*", type=int, default=[64, 256], help="rows, with --joules")
    parser.add_argument("--joules", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    args = parser.parse_args()
    if args.worker:
        return worker(args.shape[0], args.flags)
    if args.before is None:
        parser.error("--before is missing")
    from benchmarks.energy import nvml_meter

    meter = nvml_meter() if args.joules else None
    for shape in args.shape:
        table(shape, args, meter)
    return None


if __name__ == "__main__":
    main()
