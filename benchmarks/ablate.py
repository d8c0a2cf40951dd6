"""Measure what each feature is worth: one switched off at a time, on the same workloads, as a ratio to everything
switched on.

    python -m benchmarks.ablate [--shape 1b] [--batch 1 64] [--only "no graphs" ...] [--variant "NAME=FLAGS OF serve"
    ...] [-- FLAGS FOR ALL]

Decode as in benchmarks/offline.py at the given batches (ms/step), mixed-512 (output tok/s, and the 99th percentile of
the time between steps that brought tokens: what chunked prefill is for), shared prefix (s). Each row loads the model
anew in a process of its own. A ratio above 1 is what the feature gains, whichever way the figure counts. `--share 0.02`
takes that part of mixed-512 and of the shared prefix, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence

import torch

from benchmarks import offline, workloads
from benchmarks.saved import add_save_flag, saved
from photon_grpc.config.settings import settings

#: What steps on a GPU alone have.
OF_A_GPU = {"no graphs", "no overlap", "no Triton kernels, no graphs"}
#: Name of the row, flags of serve. The references of the kernels wait for the device, which cannot be captured.
VARIANTS = {
    "everything on": [],
    "no graphs": ["--enforce-eager"],
    "no overlap": ["--async-depth", "0"],
    "no prefix caching": ["--no-enable-prefix-caching"],
    "no chunked prefill": ["--no-enable-chunked-prefill"],
    "no Triton kernels, no graphs": ["--kernels", "torch", "--enforce-eager"],
}
_RESULT = "RESULT "


def known(variants: dict[str, list[str]]) -> dict[str, list[str]]:
    """Those whose flags this version has, and that change anything on this machine."""
    variants = {name: row for name, row in variants.items() if torch.cuda.is_available() or name not in OF_A_GPU}
    flags = {flag for setting in settings() for flag in (setting.flag, setting.no_flag)}
    return {name: row for name, row in variants.items() if all(f in flags for f in row if f.startswith("--"))}


def child(args: argparse.Namespace) -> None:
    """One row: says each figure as soon as it is known. More is better of what ends in tok/s, less of the others."""
    from benchmarks.engine import loaded

    def say(name: str, value: float) -> None:
        print(_RESULT + json.dumps({name: value}), flush=True)

    with loaded(args.shape, args.flags) as work:
        for batch in args.batch:
            say(f"decode {batch}, ms", offline.decode_ms(work, batch)[0])
        seconds, num_tokens = offline.mixed_s(work, args.share)
        say("mixed-512, tok/s", num_tokens / seconds)
        say("mixed-512, step p99 ms", work.slow_step_ms())
        say("shared prefix, s", offline.prefix_s(work, max(1, round(256 * args.share))))


def measure(flags: Sequence[str], args: argparse.Namespace) -> tuple[dict[str, float], str]:
    """The figures of one row, and what went wrong after them."""
    command = [sys.executable, "-m", "benchmarks.ablate", "--child", "--shape", args.shape, "--share", str(args.share)]
    command += ["--batch", *map(str, args.batch), "--", *flags, *args.flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    trouble = ""
    try:
        said, _ = process.communicate(timeout=args.row_timeout)
        trouble = f"exit code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        trouble = f"not done within {args.row_timeout:g} s"
    row: dict[str, float] = {}
    for line in said.splitlines():
        if line.startswith(_RESULT):
            row |= json.loads(line.removeprefix(_RESULT))
    return row, trouble


def table(variants: dict[str, list[str]], args: argparse.Namespace) -> None:
    base: dict[str, float] = {}
    for name, flags in variants.items():
        row, trouble = measure(flags, args)
        if not base and not row:
            print(f"{name}: {trouble}; nothing to compare with")
            return
        if not base:
            base = row
            print(f"\n| {args.shape} | {' | '.join(base)} |\n|---|{'--:|' * len(base)}")
        cells = [cell(key, row.get(key), base[key]) for key in base]
        print(f"| {name}{f' ({trouble})' if trouble else ''} | {' | '.join(cells)} |", flush=True)


def cell(key: str, value: float | None, base: float) -> str:
    """`3,210 (1.25×)`: the figure, and how much better everything switched on is."""
    if not value:
        return "–"
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
    gain = base / value if key.endswith("tok/s") else value / base
    return shown if value == base else f"{shown} ({gain:.2f}×)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=[*workloads.SHAPES, "demo"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 64])
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", metavar="NAME", help=f"rows beside the first: {', '.join(VARIANTS)}")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS", help="another row; repeatable")
    parser.add_argument("--row-timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags of serve for every row, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    variants = {name: row for name, row in known(VARIANTS).items() if not row or args.only is None or name in args.only}
    variants |= {name: shlex.split(flags) for name, _, flags in (text.partition("=") for text in args.variant)}
    with saved(args.save):
        table(variants, args)


if __name__ == "__main__":
    main()
