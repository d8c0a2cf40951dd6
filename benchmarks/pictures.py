"""Pictures of the tables in benchmarks/results, so that none shows what its table does not say.

    python -m benchmarks.pictures [NAME...]

Needs matplotlib, no GPU: tables are brought from where they were measured, pictures are drawn here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.saved import RESULTS

#: Of ours and of those we compare with, in every picture.
COLOURS = {"photon_grpc": "#d6336c", "floor": "#adb5bd", "vLLM": "#495057", "vLLM gRPC": "#495057", "before": "#adb5bd"}
_MORE_COLOURS = ("#1c7ed6", "#2f9e44", "#e8590c", "#7048e8", "#0c8599", "#868e96")

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """A column over another. `part`: of a cell such as "660 / 765". `only`: (column, cell) of the rows it takes."""

    name: str
    column: str
    part: int = 0
    only: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over a logarithmic x."""

    table: str
    title: str
    x: str
    lines: tuple[Line, ...]
    y_name: str
    y_is_log: bool = False
    #: The heading over the table, where the file has several of these columns.
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Shares:
    """A grid: a row for each heading, a column for each value of `x`, in each cell one column's share of another."""

    table: str
    title: str
    x: str
    part: str
    whole: str


def _over_rows(heading: str) -> tuple[Line, ...]:
    rows = ("1", "8") if heading.startswith("1B") else ("1",)
    return tuple(
        Line(f"{name}, {row} row{'' if row == '1' else 's'}", column, only=("rows", row))
        for row in rows
        for name, column in (("before", "before, ms"), ("photon_grpc", "after, ms"))
    )


_DECODE = (Line("photon_grpc", "ms/step"), Line("vLLM 0.24", "vLLM 0.24 ms"), Line("floor", "floor ms"))
PICTURES: dict[str, Curves | Shares] = {
    "decode_1b_h200": Curves("offline_1b_h200", "A decode step, 1B shape", "batch", _DECODE, "ms"),
    "decode_8b_h200": Curves("offline_8b_h200", "A decode step, 8B shape", "batch", _DECODE, "ms"),
    "serve_1b_h200": Curves(
        "serve_1b_h200",
        "Text over gRPC, 1B shape",
        "streams",
        (
            Line("photon_grpc, gRPC", "tok/s"),
            Line("vLLM 0.24, Rust HTTP", "vLLM gRPC / Rust HTTP", 1),
            Line("vLLM 0.24, gRPC, ids only", "vLLM gRPC / Rust HTTP", 0),
        ),
        "tokens/s",
        y_is_log=True,
        heading="One front end",
    ),
    "long_context_1b_h200": Curves(
        "long_context_h200",
        "Layers of a decode step over the context, 1B shape",
        "context",
        _over_rows("1B"),
        "ms",
        heading="1B, layers of a step",
    ),
    "long_context_8b_h200": Curves(
        "long_context_h200",
        "Layers of a decode step over the context, 8B shape",
        "context",
        _over_rows("8B"),
        "ms",
        heading="8B, layers of a step",
    ),
    "shapes_h200": Shares("shapes_h200", "Share of the floor, decode layers", "rows", "floor µs", "chosen µs"),
}


def tables(text: str) -> list[tuple[str, list[Row]]]:
    """(the heading above it, its rows by the names of their columns) of every table of a Markdown text."""
    found: list[tuple[str, list[Row]]] = []
    heading, columns = "", []
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not columns:
            columns = cells
            found.append((heading, []))
        elif not re.fullmatch(r"[|:\- ]+", line):
            found[-1][1].append(dict(zip(columns, cells, strict=False)))
    return found


def number(cell: str, part: int = 0) -> float | None:
    """The first number of a cell, or of its part between slashes; None where there is none."""
    parts = cell.split("/")
    found = re.search(r"\d[\d,]*\.?\d*", parts[part]) if part < len(parts) else None
    return float(found[0].replace(",", "")) if found else None


def points(rows: Sequence[Row], x: str, line: Line) -> list[tuple[float, float]]:
    """Sorted by x. Raise ValueError where the table has none."""
    wanted = [row for row in rows if line.only is None or row.get(line.only[0]) == line.only[1]]
    pairs = [(number(row.get(x, "")), number(row.get(line.column, ""), line.part)) for row in wanted]
    found = sorted((at, value) for at, value in pairs if at is not None and value is not None)
    if not found:
        raise ValueError(f"the table has no {line.column} over {x} for the line {line.name}")
    return found


def draw(picture: Curves | Shares, text: str) -> Any:
    """A matplotlib Figure of the table in `text`. Raise ValueError where the table has not its columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    if isinstance(picture, Curves):
        _draw_curves(axes, picture, tables(text))
    else:
        _draw_shares(figure, axes, picture, tables(text))
    axes.set_title(picture.title, loc="left", fontweight="bold")
    return figure


def _draw_curves(axes: Any, picture: Curves, found: list[tuple[str, list[Row]]]) -> None:
    rows = next((rows for heading, rows in found if picture.heading in heading and rows and picture.x in rows[0]), None)
    if rows is None:
        raise ValueError(f"{picture.table} has no table with the column {picture.x}")
    spare = iter(_MORE_COLOURS)
    ticks: set[float] = set()
    for line in picture.lines:
        at = points(rows, picture.x, line)
        colour = next((COLOURS[key] for key in COLOURS if line.name.startswith(key)), None) or next(spare)
        style = "--" if "HTTP" in line.name or ", 8 rows" in line.name else "-"
        axes.plot(*zip(*at, strict=True), style, color=colour, marker="o", markersize=4, label=line.name)
        ticks |= {x for x, _ in at}
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{x:,.0f}" for x in sorted(ticks)])
    axes.set_yscale("log" if picture.y_is_log else "linear")
    if not picture.y_is_log:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(picture.x)
    axes.set_ylabel(picture.y_name)
    axes.grid(axis="y", color="#e9ecef")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _draw_shares(figure: Any, axes: Any, picture: Shares, found: list[tuple[str, list[Row]]]) -> None:
    grid = {
        heading: {row[picture.x]: (number(row[picture.part]) or 0) / (number(row[picture.whole]) or 1) for row in rows}
        for heading, rows in found
        if rows and picture.whole in rows[0]
    }
    columns = sorted({x for row in grid.values() for x in row}, key=float)
    cells = [[row.get(column, float("nan")) for column in columns] for row in grid.values()]
    figure.set_size_inches(7.2, 1.2 + 0.26 * len(grid))
    axes.imshow(cells, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(grid)), grid)
    axes.set_xlabel(picture.x)
    for y, row in enumerate(cells):
        for x, share in enumerate(row):
            if share == share:  # a cell that was measured
                colour = "white" if share > 0.6 else "black"
                axes.text(x, y, f"{100 * share:.0f} %", ha="center", va="center", color=colour, fontsize=8)


def write(name: str, results: Path = RESULTS) -> Path:
    """Draw one picture beside its table. Raise ValueError where the table has not its columns."""
    from matplotlib import rc_context

    picture = PICTURES[name]
    path = results / f"{name}.svg"
    # Text stays text; the same table gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = draw(picture, (results / f"{picture.table}.md").read_text(encoding="utf-8"))
        figure.savefig(path, metadata={"Date": None})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"unset: all of {', '.join(PICTURES)}")
    for name in parser.parse_args().names or PICTURES:
        print(write(name))


if __name__ == "__main__":
    main()
