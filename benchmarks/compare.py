"""Says what moved between two result files: every figure of their tables that differs by more than a few percent.

    python -m benchmarks.compare BEFORE.md AFTER.md [--percent 3]

A figure is named by its heading, its row's first cell and its column. The exit code is 1 where one moved or is missing
in the second file, so that a script can stop there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: Heading, row, column.
Name = tuple[str, str, str]
_NUMBER = re.compile(r"-?[\d,]*\.?\d+")


def figures(text: str) -> dict[Name, float]:
    """The numbers in the cells of all tables; of two under one name the first."""
    found: dict[Name, float] = {}
    heading, columns = "", list[str]()
    for line in text.splitlines():
        if line.startswith("#"):
            # The title is the file's name.
            heading = "" if line.startswith("# ") else line.lstrip("# ").strip()
        cells = [cell.strip(" `*") for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        else:
            for column, cell in list(zip(columns, cells, strict=False))[1:]:
                if (number := _NUMBER.search(cell)) and not set(cell) <= set("-: "):
                    found.setdefault((heading, cells[0], column), float(number[0].replace(",", "")))
    return found


def moved(before: dict[Name, float], after: dict[Name, float], percent: float) -> Iterator[str]:
    """A line for each figure that is gone, or further from what it was than so many percent of it."""
    for name, old in before.items():
        where = " · ".join(part for part in name if part)
        if name not in after:
            yield f"{where}: {old:g} → missing"
        elif abs(after[name] - old) > percent / 100 * abs(old):
            change = f"{100 * (after[name] / old - 1):+.1f} %" if old else "was 0"
            yield f"{where}: {old:g} → {after[name]:g} ({change})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--percent", type=float, default=3.0)
    arguments = parser.parse_args()
    before, after = (figures(path.read_text(encoding="utf-8")) for path in (arguments.before, arguments.after))
    lines = list(moved(before, after, arguments.percent))
    print("\n".join([*lines, f"{len(lines)} of {len(before)} figures moved by more than {arguments.percent:g} %"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
