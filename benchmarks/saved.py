"""Keeps what a benchmark prints, with what it was measured on, in `benchmarks/results/NAME.md`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

RESULTS = Path(__file__).parent / "results"
_VERSIONS_OF = ("photon-grpc", "torch", "triton", "grpcio", "transformers")


def add_save_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", metavar="NAME", help="also write what is printed to benchmarks/results/NAME.md")


@contextlib.contextmanager
def saved(name: str | None) -> Iterator[None]:
    """Prints where and with what the block runs; with a name, writes that and all that the block prints to a file, also
    when it fails."""
    both = _Both(sys.stdout)
    # The code that runs is the code of now, whatever is edited meanwhile.
    of = commit() if name else ""
    with contextlib.redirect_stdout(both):
        print(f"{machine()}; {versions()}\n", flush=True)
        try:
            yield
        finally:
            if name:
                _write(RESULTS / f"{name}.md", of, both.text())


class _Both(io.TextIOBase):
    """Writes on, and remembers."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._parts: list[str] = []

    def write(self, text: str) -> int:
        self._parts.append(text)
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def text(self) -> str:
        return "".join(self._parts)


def _write(path: Path, of: str, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    head = ", ".join(part for part in (f"`{command()}`", when, of) if part)
    path.write_text(f"# {path.stem}\n\n{head}\n\n{text.strip()}\n", encoding="utf-8")
    print(f"\nwritten: {path}", file=sys.stderr)


def command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"
    return " ".join([program, *sys.argv[1:]])


def commit() -> str:
    """Return `commit 1db4517`, or `commit 1db4517 with uncommitted changes`; nothing outside a git repository. Results
    that were written before are no changes.
    """
    root = RESULTS.parents[1]
    # A copy without history may lie within another repository.
    if _git(root, "rev-parse", "--show-prefix") != "" or not (short := _git(root, "rev-parse", "--short", "HEAD")):
        return ""
    changes = _git(root, "status", "--porcelain", "--", ".", f":(exclude){RESULTS.relative_to(root)}")
    return f"commit {short}{' with uncommitted changes' if changes else ''}"


def _git(root: Path, *arguments: str) -> str | None:
    """What git says, without the space around it; None where it fails or is missing."""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> str:
    """Return what a figure was measured on: `NVIDIA H200 (driver 580.1), Intel Xeon ..., 16 cores, Python 3.12.3`."""
    parts = [*_gpus(), _processor(), f"{_cores()} cores", f"Python {platform.python_version()}"]
    return ", ".join(parts)


def versions() -> str:
    """`torch 2.11.0, triton 3.6.0, ...`, of what is installed."""
    found = []
    for name in _VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def _gpus() -> list[str]:
    """Asked of nvidia-smi: torch would put a context on the device beside the service's."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    names = [
        line.split(",")[0].strip() + f" (driver {line.split(',')[1].strip()})"
        for line in told.splitlines()
        if "," in line
    ]
    return [f"{len(names)} × {names[0]}" if len(names) > 1 else names[0]] if names else []


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
