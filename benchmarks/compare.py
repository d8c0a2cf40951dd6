"""Says what moved between two result files: every figure of their tables that differs by more than a few percent.

    python -m benchmarks.compare BEFORE.md AFTER.md [--percent 3]

A figure is named by its heading, its row and its column. A row is named by as many of its first cells as tell the
table's rows apart in both files; every number of another cell is a figure, except in parentheses: of "142 / **42**"
both. Tables are found again by heading and columns (what a start measures, such as "loaded in 9.6 s", is no part of a
heading); where a heading is nowhere in the other file, by their columns, if one table in either file has them.

Columns that begin with "above", "bar", "behind", "beyond", "margin", "more" or "over" hold differences, which may be
near zero: they are compared with the largest figure of their unit in the row, those in percent by points. By --percent
3 "above µs" has moved if it differs by more than 3 % of "chosen µs", "behind %" if by more than 3 points.

The exit code is 1 where a figure moved or is missing in the second file, and where nothing was compared, so that a
script can stop there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

#: Not within a word, of which a commit's hash is one.
_NUMBER = re.compile(r"(?:(?<![\w.])[-−])?(?<![\w.,])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?![A-Za-z]*\d)")
_PARENTHESES = re.compile(r"\([^()]*\)")
#: Parts of a heading that differ from start to start.
_OF_A_START = re.compile(r", \d+ KV blocks of \d+|, loaded in [\d.]+ s")
_DIFFERENCE = re.compile(r"(above|bar|behind|beyond|margin|more|over)\b")


class Table(NamedTuple):
    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Figure(NamedTuple):
    """`scale`: what its change is a share of, None where percent of it are points."""

    value: float
    scale: float | None


#: Heading, row, column, and the place among the figures of its cell, from 0.
Name = tuple[str, str, str, int]


def tables(text: str) -> list[Table]:
    """All tables of a Markdown text."""
    found: list[tuple[str, list[tuple[str, ...]]]] = []
    heading, is_inside = "", False
    for line in text.splitlines():
        if line.startswith("#"):
            # The title is the file's name.
            heading = "" if line.startswith("# ") else _OF_A_START.sub("", line.lstrip("# ").strip())
        if line.startswith("|") and not is_inside:
            found.append((heading, []))
        is_inside = line.startswith("|")
        if is_inside and not set(line) <= set("|-: "):
            found[-1][1].append(_cells(line))
    return [Table(heading, lines[0], tuple(lines[1:])) for heading, lines in found if lines]


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip(" `*") for cell in re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|")))


def numbers(cell: str) -> dict[int, float]:
    """The figures of a cell by their places; a part between slashes without one takes a place, too."""
    parts = _PARENTHESES.sub("", cell).split("/")
    places = [number for part in parts for number in _NUMBER.findall(part) or [""]]
    return {i: float(found.replace(",", "").replace("−", "-")) for i, found in enumerate(places) if found}


def num_names(table: Table) -> int:
    """The first cells by which its rows are told apart; 1 where they are not."""
    for count in range(1, len(table.columns)):
        if len({row[:count] for row in table.rows}) == len(table.rows):
            return count
    return 1


def figures(table: Table, names: int) -> dict[Name, Figure]:
    """All figures of a table whose rows are named by so many cells."""
    found: dict[Name, Figure] = {}
    columns = numbered(table.columns)
    rows = numbered([" · ".join(cell for cell in row[:names] if cell) for row in table.rows])
    for name, row in zip(rows, table.rows, strict=True):
        cells = list(zip(columns, row, strict=False))[names:]
        for column, cell in cells:
            for place, value in numbers(cell).items():
                found[table.heading, name, column, place] = Figure(value, _scale(column, cell, value, cells))
    return found


def numbered(names: Sequence[str]) -> list[str]:
    """Those that stand there again as "name (2)", "name (3)"."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return found


def _scale(column: str, cell: str, value: float, cells: list[tuple[str, str]]) -> float | None:
    """Of a difference the largest figure that is none and has the same unit, its column's last word."""
    if not _DIFFERENCE.match(column):
        return abs(value)
    if "%" in column + cell:
        return None
    others = ((other, text) for other, text in cells if not _DIFFERENCE.match(other))
    alike = (text for other, text in others if _unit(other) == _unit(column))
    return max((abs(number) for text in alike for number in numbers(text).values()), default=abs(value))


def _unit(column: str) -> list[str]:
    return re.sub(r" \(\d+\)$", "", column).split()[-1:]


def pairs(before: list[Table], after: list[Table]) -> Iterator[tuple[Table, Table | None]]:
    """Each table of the one with its like in the other."""
    counts = [Counter(table.columns for table in side) for side in (before, after)]
    alike: tuple[Callable[[Table], Hashable], ...] = (
        lambda table: (table.heading, table.columns),
        lambda table: (table.heading, table.columns[0]),
        lambda table: table.columns if all(count[table.columns] == 1 for count in counts) else id(table),
    )
    found: dict[int, Table] = {}
    left = list(after)
    for key in alike:
        for number, table in enumerate(before):
            like = next((other for other in left if key(other) == key(table)), None)
            if number not in found and like is not None:
                found[number] = like
                left = [other for other in left if other is not like]
    return ((table, found.get(number)) for number, table in enumerate(before))


def compared(before: str, after: str) -> Iterator[tuple[Name, Figure, Figure | None]]:
    """(name, figure before, after or None) of all figures of a Markdown text."""
    for table, like in pairs(tables(before), tables(after)):
        names = max(num_names(each) for each in (table, like) if each)
        others = figures(like._replace(heading=table.heading), names) if like else {}
        for name, figure in figures(table, names).items():
            yield name, figure, others.get(name)


def moved(name: Name, before: Figure, after: Figure | None, percent: float) -> str | None:
    """A line for a figure that is gone, or further from what it was than so many percent; None for any other."""
    *parts, place = name
    where = " · ".join(part for part in parts if part) + (f" [{place + 1}]" if place else "")
    if after is None:
        return f"{where}: {before.value:g} → missing"
    limit = percent if before.scale is None else percent / 100 * before.scale
    change = after.value - before.value
    if abs(change) <= limit * (1 + 1e-9):
        return None
    if before.scale != abs(before.value):
        told = f"{change:+.3g}"
    else:
        told = f"{100 * change / before.value:+.1f} %" if before.value else "was 0"
    return f"{where}: {before.value:g} → {after.value:g} ({told})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--percent", type=float, default=3.0)
    arguments = parser.parse_args()
    before, after = (path.read_text(encoding="utf-8") for path in (arguments.before, arguments.after))
    found = list(compared(before, after))
    if not any(other for _, _, other in found):
        print(f"nothing was compared: {arguments.after} has none of the {len(found)} figures of {arguments.before}")
        return 1
    lines = [line for each in found if (line := moved(*each, arguments.percent))]
    print("\n".join([*lines, f"{len(lines)} of {len(found)} figures moved by more than {arguments.percent:g} %"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
