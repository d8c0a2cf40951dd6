"""Decode steps on a CPU with weights of several formats, in turns: CPU and wall milliseconds a step of one stream.

    python -m benchmarks.cpu_steps [--shape 1b] [--formats bfloat16 int8+head int4-g128+head] [--threads 1 2]

A format is a value of --quantization, "+head" with --quantization-head int8, or bfloat16. All models are held at once,
with random weights. A step is the difference of answers of 24 and of 8 tokens, shared among 16, of each the least of
--rounds, because other work on the cores only adds. CPU time is of all threads of this process. Shares are of the first
format.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack

import torch

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.saved import add_save_flag, saved

LONG, SHORT = 24, 8
#: Of serve: little memory for keys and values.
FLAGS = ("--device", "cpu", "--dtype", "bfloat16", "--max-model-len", "256", "--num-blocks", "64")


def flags_of(name: str) -> list[str]:
    form, _, head = name.partition("+")
    flags = [] if form == "bfloat16" else ["--quantization", form]
    return [*FLAGS, *flags, *(["--quantization-head", "int8"] if head else [])]


def answer_s(work: Work, num_tokens: int) -> tuple[float, float]:
    """Return the CPU and wall seconds of an answer."""
    begin = time.process_time(), time.perf_counter()
    work.run([workloads.prompt(900, 0, 16)], [num_tokens])
    return time.process_time() - begin[0], time.perf_counter() - begin[1]


def step_ms(work: Work, least: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Return the CPU and wall milliseconds a step, from the least of each length so far, which are updated."""
    for length in (LONG, SHORT):
        found = answer_s(work, length)
        least[length] = tuple(map(min, found, least.get(length, found)))  # type: ignore[assignment]
    cpu, wall = ((long - short) / (LONG - SHORT) * 1e3 for long, short in zip(least[LONG], least[SHORT], strict=True))
    return cpu, wall


def measure(works: dict[str, Work], threads: int, rounds: int) -> None:
    """Print a row for each format."""
    torch.set_num_threads(threads)
    least: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in works}
    steps = {}
    for _ in range(rounds):
        for name, work in works.items():
            steps[name] = step_ms(work, least[name])
    first = next(iter(steps.values()))
    for name, (cpu, wall) in steps.items():
        shown = f"{cpu:.1f} ({first[0] / cpu:.2f}) | {wall:.1f} ({first[1] / wall:.2f})"
        print(f"| {threads} | {name} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["demo", *workloads.SHAPES], default="1b")
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "int8+head", "int4-g128+head"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    add_save_flag(parser)
    args = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by the first parallel operation
    with saved(args.save), ExitStack() as stack:
        works = {name: stack.enter_context(loaded(args.shape, flags_of(name))) for name in args.formats}
        print("\n| threads | weights | CPU ms a step (times as fast) | wall ms (times as fast) |\n|--:|---|--:|--:|")
        for threads in args.threads:
            measure(works, threads, args.rounds)


if __name__ == "__main__":
    main()
