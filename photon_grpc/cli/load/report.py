"""The report of `bench`: rates, percentiles with their distributions, failures, and a plot if requested."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from photon_grpc.cli.load.load import Latencies, Percentiles, Summary
from photon_grpc.errors import ConfigError

#: A delay at p99 from which the client processes were too slow to send on time.
_TOO_LATE_S = 0.01
#: The columns of a distribution in the terminal, and their heights.
_COLUMNS = 24
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_PLOTS = (".svg", ".png", ".pdf")

#: By field of Summary and Latencies: its label, and the decimals of its milliseconds.
_ROWS = {
    "ttft_s": ("to the first token", 1),
    "tpot_s": ("per output token after it", 2),
    "gap_s": ("between messages", 2),
    "total_s": ("whole request", 1),
}


def report(title: str, summary: Summary, latencies: Latencies) -> None:
    """Print the report on stdout."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(title, markup=False)
    console.print(_rates(summary), markup=False)
    if summary.completed:
        console.print(_table(summary, latencies))
    for reason, failures in summary.failures.items():
        console.print(f"{failures.count} failed with {reason}: {failures.message}", markup=False)
    if summary.late_s.p99 > _TOO_LATE_S:
        console.print(
            f"requests were sent up to {summary.late_s.p99 * 1e3:.0f} ms late (p99); use more --processes", markup=False
        )


def _rates(summary: Summary) -> str:
    parts = [
        f"{summary.completed} completed in {summary.duration_s:.2f} s",
        f"{summary.requests_per_s:,.2f} requests/s",
        f"{summary.output_tokens_per_s:,.0f} output tokens/s",
        f"{summary.prompt_tokens_per_s:,.0f} prompt tokens/s",
        f"{summary.tokens_per_message:.2f} tokens per message",
    ]
    if summary.cached_prompt_tokens:
        parts.append(f"{100 * summary.cached_prompt_tokens / summary.prompt_tokens:.0f} % of prompt tokens cached")
    if summary.draft_tokens:
        share = summary.accepted_draft_tokens / summary.draft_tokens
        parts.append(f"{summary.draft_tokens:,} tokens drafted, {share:.0%} of them right")
    return " · ".join(parts)


def _table(summary: Summary, latencies: Latencies) -> Any:
    from rich.table import Table

    table = Table("milliseconds", box=None, header_style="bold", pad_edge=False)
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right", min_width=9)
    table.add_column("from 0 to p99", no_wrap=True)
    for name, (shown, digits) in _ROWS.items():
        value: Percentiles = getattr(summary, name)
        cells = [f"{seconds * 1e3:,.{digits}f}" for seconds in (value.p50, value.p90, value.p99)]
        # If every answer is one message, there are no gaps between messages.
        table.add_row(shown, *(["–"] * 3 if value == Percentiles() else [*cells, bars(getattr(latencies, name))]))
    return table


def bars(values: Sequence[float]) -> str:
    """Draw a histogram of the values in 24 equal parts of 0 to p99, in which every part with a value is visible."""
    end = Percentiles.of(values).p99
    if not end:
        return ""
    counts = [0] * _COLUMNS
    for value in values:
        if value <= end:
            counts[min(int(value / end * _COLUMNS), _COLUMNS - 1)] += 1
    top = max(counts)
    return "".join(_HEIGHTS[-(-count * (len(_HEIGHTS) - 1) // top)] for count in counts)


def check_plot(path: Path) -> None:
    """Raise ConfigError if no plot can be written to `path`; called before the load begins."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install '.[plot]' in the clone", field="--plot")
    if path.suffix.lower() not in _PLOTS:
        raise ConfigError(f"--plot: {path} must end with one of {', '.join(_PLOTS)}", field="--plot")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot: there is no directory {path.parent}", field="--plot")


def write_plot(path: Path, title: str, latencies: Latencies) -> None:
    """Plot the cumulative distribution of each latency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    figure.suptitle(title, fontsize=8)
    for axes, (name, (shown, _)) in zip(figure.subplots(2, 2).flat, _ROWS.items(), strict=True):
        values = sorted(seconds * 1e3 for seconds in getattr(latencies, name))
        axes.step(values, [(index + 1) / len(values) for index in range(len(values))], where="post", color="#d6336c")
        for share in (0.5, 0.9, 0.99):
            axes.axhline(share, color="#ced4da", linewidth=0.8)
        axes.set(title=shown, xlabel="ms", ylim=(0, 1.01), yticks=[0, 0.5, 0.9, 0.99])
        axes.set_xlim(left=0)
    figure.savefig(path)
