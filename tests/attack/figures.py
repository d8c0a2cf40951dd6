"""The table of what attacks did: printed, and written as Markdown or JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_TITLES = ("attack", "sent", "came back", "neighbour, s", "recovery, s", "left behind")
_MOST_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Figure:
    """One attack. Seconds as text: a dash where there is nothing to say."""

    attack: str
    sent: str
    came_back: str
    neighbour: str = "–"
    recovery: str = "–"
    left_behind: str = "–"


class Figures:
    """Those of one run, in the order in which the attacks ended."""

    def __init__(self) -> None:
        self.rows: list[Figure] = []

    def add(self, attack: str, sent: str, came_back: str | Counter[str], **more: str) -> None:
        told = came_back if isinstance(came_back, str) else counted(came_back)
        self.rows.append(Figure(attack, sent, told, **more))

    def markdown(self) -> str:
        cells = [_TITLES, *(tuple(asdict(row).values()) for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_TITLES))]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        lines.insert(1, " | ".join("-" * width for width in widths))
        return "".join(f"| {line} |\n" for line in lines)

    def write(self, path: Path) -> None:
        """Markdown, or JSON where the name ends so."""
        if path.suffix == ".json":
            path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1, ensure_ascii=False) + "\n")
        else:
            path.write_text(self.markdown())


def counted(outcomes: Counter[str]) -> str:
    """`OK 812, INVALID_REQUEST 190`: the most frequent, and how many others."""
    shown = [f"{name} {count:,}" for name, count in outcomes.most_common(_MOST_SHOWN)]
    others = sum(outcomes.values()) - sum(count for _, count in outcomes.most_common(_MOST_SHOWN))
    return ", ".join([*shown, *([f"others {others:,}"] if others else [])])


assert len(_TITLES) == len(fields(Figure))
