"""Measure what telling costs, in µs of the processor time of the thread that tells: load reports, spans, the trace
of steps, pictures for a front end that watches.

    python -m benchmarks.telemetry [--save NAME]

No model, no socket. Spans are made and kept (their collector is not there), so sending them is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from benchmarks import overhead
from benchmarks.saved import add_save_flag, saved
from photon_grpc.core.ask import Origin
from photon_grpc.core.generation import Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.core.stats import Load
from photon_grpc.frontend.record import RequestRecord
from photon_grpc.observe.spans import RequestSpans
from photon_grpc.server.standard.load_report import LoadReports

_ORIGIN = Origin(
    0.0, "r", "team", "Generate", "demo", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
)
RECORD = RequestRecord(
    _ORIGIN,
    "",
    1000.0,
    4.0,
    (FinishReason.EOS,),
    Usage(100, 64, 30),
    30,
    0,
    queue_s=0.5,
    first_token_s=1.5,
    last_token_s=3.5,
)
_NUM_ROWS = 256


class _Frontend:
    """As much of one as load reports look at."""

    def __init__(self) -> None:
        self.facts = _facts()
        self.load = Load()

    def stepped(self) -> None:
        self.load = Load(running=5, queued=2, total_blocks=100, owned_blocks=40, ended_per_s=3.0)


def _facts() -> Any:
    return overhead.Facts(1000, 1000, overhead.PLAN, 100, 64, 8192, 1024, 1 << 20, "none", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    add_save_flag(parser)
    args = parser.parse_args()
    with saved(args.save):
        table(args.repeats)


def table(repeats: int) -> None:
    frontend = _Frontend()
    reports = LoadReports(cast(Any, frontend))
    # Nobody listens on port 1.
    spans = RequestSpans("http://127.0.0.1:1", "replica")
    print("| what | median µs |\n|---|--:|")
    print_row("load report of the first call that ends with a step", repeats, reports.trailers, frontend.stepped)
    print_row("load report of each further one", repeats, reports.trailers)
    print_row("spans of a request", repeats, lambda: spans.ended(RECORD))
    with tempfile.TemporaryDirectory() as directory:
        traced = {"trace_file": str(Path(directory) / "steps.jsonl")}
        for name, how in (("", {}), (", traced", traced), (", watched", {"is_watched": True})):
            times = overhead.measure(_NUM_ROWS, repeats, depth=1, clock=time.thread_time, **how)
            print(f"| engine step of {_NUM_ROWS} rows{name} | {statistics.median(times) * 1e6:.1f} |")


def print_row(what: str, repeats: int, call: Callable[[], object], prepare: Callable[[], None] | None = None) -> None:
    times = []
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    print(f"| {what} | {statistics.median(times) * 1e6:.1f} |")


if __name__ == "__main__":
    main()
