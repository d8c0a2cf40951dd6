"""Measure one replica on several GPUs beside one GPU: equal ids, ms a step, tok/s of prompts, time to the first token.

    python -m benchmarks.ranks --shape 8b --ranks 2 [--turn FILE] [--kill] [--profile] [-- FLAGS OF serve]
    python -m benchmarks.ranks --ids ids.json --shape 1b --ranks 2 [--by pipeline] -- --dtype float32

Weights are random. With `--ids` the greedy ids of 32 prompts are compared with those in the file, which the first run
writes. `--turn` waits for a lock on that file before it measures, so that `--beside` runs may load at a time. `--kill`
ends rank 1 by SIGKILL, in a step, and tells after how many ms this process was told. `--profile` shows what rank 0's
device does in decode steps, from a prompt to its first token, and for 16 prompts.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.profile import decode, record, tables


def decode_ms(work: Work, rows: int) -> float:
    prompts = [workloads.prompt(900, request, 128) for request in range(rows)]
    long, short = (work.run(prompts, [count] * rows) for count in (96, 32))
    return (long - short) / 64 * 1e3


def prefill(work: Work, length: int) -> float:
    return 16 * length / work.run([workloads.prompt(901, request, length) for request in range(16)], [1] * 16)


def first_ms(work: Work, length: int) -> float:
    return statistics.median(work.run([workloads.prompt(902, i, length)], [1]) for i in range(3)) * 1e3


def measure(work: Work, rows: Sequence[int], prompts: Sequence[int]) -> dict[str, float]:
    """Return the second of two measurements each; both are told as they come."""
    decode_ms(work, 1)
    found: dict[str, float] = {}

    def twice(name: str, measured: Callable[[], float]) -> None:
        first, found[name] = measured(), measured()
        print(f"{name}: {first:,.3f}, {found[name]:,.3f}", flush=True)

    for count in rows:
        twice(f"decode, ms a step, {count} rows", partial(decode_ms, work, count))
    for length in prompts:
        twice(f"prefill 16 x {length}, tok/s", partial(prefill, work, length))
        twice(f"first token after {length}, ms", partial(first_ms, work, length))
    return found


def compare(work: Work, file: Path) -> dict[str, float]:
    """Return how many of the ids differ from those in the file, and how many outputs do at all."""
    prompts = [workloads.prompt(903, request, 16 + 7 * request) for request in range(32)]
    work.run(prompts, [32] * len(prompts))
    first = min(work.ids)
    mine = {str(handle - first): ids for handle, ids in work.ids.items()}
    if not file.exists():
        file.write_text(json.dumps(mine))
        return {"ids written": sum(map(len, mine.values()))}
    theirs = json.loads(file.read_text())
    outputs = [(theirs[key], ids) for key, ids in mine.items()]
    equal = sum(a == b for a, b in outputs)
    at = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), -1) for a, b in outputs]
    print(f"first differences: {[place for place in at if place >= 0]}", flush=True)
    return {"outputs": len(outputs), "outputs with equal ids": equal}


def show_profiles(work: Work, counts: Sequence[int], length: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for count in counts:
            rows, steps, elapsed_s = record(decode(work, count, 32), Path(directory) / "trace.json", on_cuda=True)
            print(f"\nsteps of {count} rows")
            tables(rows, steps, elapsed_s, 20, "on the device of rank 0")
            while work.num_open:
                work.step()
        for count in (1, 16):
            prompts = [workloads.prompt(905, i, length) for i in range(count)]

            def measured(prompts: list[tuple[int, ...]] = prompts) -> int:
                work.run(prompts, [1] * len(prompts))
                return len(work.step_times_s)

            rows, steps, elapsed_s = record(measured, Path(directory) / "trace.json", on_cuda=True)
            print(f"\n{count} prompts of {length} tokens")
            tables(rows, steps, elapsed_s, 12, "on the device of rank 0")


def show_memory() -> None:
    mib = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
    print("torch of rank 0: {:,} MiB allocated, {:,} at most, {:,} reserved".format(*(each >> 20 for each in mib)))


def kill(work: Work) -> dict[str, float]:
    """End rank 1 in a step; tell when the thread that watches it says so, and end this process."""
    leading = work.ranks
    (pid,) = leading.pids[:1]
    killed_s = 0.0

    def lost(code: int) -> None:
        print(f"| rank 1 killed, told after ms | {(time.perf_counter() - killed_s) * 1e3:.1f} |", flush=True)
        os._exit(0)

    def end() -> None:
        nonlocal killed_s
        killed_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)

    leading._on_lost = lost
    threading.Timer(0.5, end).start()
    while True:
        work.run([workloads.prompt(904, i, 128) for i in range(8)], [64] * 8)


def take_turn(lock: Any, file: Path, beside: int) -> None:
    """Wait until so many runs are loaded, 90 s at most, and until no other one measures."""
    lock.write("loaded\n")
    lock.flush()
    give_up_s = time.monotonic() + 90
    while len(file.read_text().splitlines()) < beside and time.monotonic() < give_up_s:
        time.sleep(0.05)
    fcntl.flock(lock, fcntl.LOCK_EX)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="demo", help="of benchmarks/shapes.py; demo: the embedded model")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--by", choices=["tensor", "expert", "pipeline"], default="tensor")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048])
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--beside", type=int, default=1, help="runs that load at a time, with the same --turn")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    flags = [f"--{args.by}-parallel-size", str(args.ranks), *args.flags]
    max_len = 4096 if args.shape != "demo" else 0
    with loaded(args.shape, flags, max_len) as work:
        lock: Any = args.turn.open("a") if args.turn else None
        if lock:
            take_turn(lock, args.turn, args.beside)
        found = compare(work, args.ids) if args.ids else measure(work, args.rows, args.prompts)
        print(f"\n| {args.shape}, {args.ranks} ranks | |\n|---|--:|", flush=True)
        for name, value in found.items():
            print(f"| {name} | {value:,.3f} |", flush=True)
        if torch.cuda.is_available():
            show_memory()
        if args.profile:
            show_profiles(work, args.rows, args.prompts[0])
        if args.kill and args.ranks > 1:
            kill(work)
        if args.ranks > 1:
            # As the engine process ends: libraries may wait for ranks that have ended.
            work.ranks.close()
            os._exit(0)


if __name__ == "__main__":
    main()
