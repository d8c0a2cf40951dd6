"""Lines over a logarithmic axis, and shares in a grid, as a small SVG, without a library."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import log2
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 360, 56, 36, 120, 44
_COLOURS = ("#d6336c", "#495057", "#adb5bd", "#1c7ed6")


def write(path: Path, title: str, x_name: str, lines: Mapping[str, Mapping[float, float]]) -> None:
    """x is positive and drawn to base 2, y begins at zero; a line without points is left out."""
    shown = {name: dict(sorted(points.items())) for name, points in lines.items() if points}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(title, x_name, shown), encoding="utf-8")


def svg(title: str, x_name: str, lines: Mapping[str, Mapping[float, float]]) -> str:
    xs = sorted({x for points in lines.values() for x in points})
    top = max((y for points in lines.values() for y in points.values()), default=1.0) * 1.05 or 1.0
    first, last = log2(xs[0]), log2(xs[-1])
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        share = (log2(x) - first) / (last - first) if last > first else 0.5
        return round(_LEFT + width * share, 1), round(_TOP + height * (1 - y / top), 1)

    parts = [_text(_LEFT, 20, title, weight="bold"), _text(_LEFT + width / 2, _HEIGHT - 8, x_name, "middle")]
    parts += [_text(at(x, 0)[0], _HEIGHT - 26, f"{x:g}", "middle") for x in xs]
    for step in range(5):
        y = at(xs[0], top * step / 4)[1]
        parts.append(f'<path d="M{_LEFT} {y}h{width}" stroke="#e9ecef"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{top * step / 4:.3g}", "end"))
    for (name, points), colour in zip(lines.items(), _COLOURS, strict=False):
        places = [at(x, y) for x, y in points.items()]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(_text(places[-1][0] + 8, places[-1][1] + 4, name, colour=colour))
    return _document(_WIDTH, _HEIGHT, parts)


def write_grid(path: Path, title: str, shares: Mapping[str, Mapping[int, float]]) -> None:
    """A row of cells for each name, a column for each number; a share of 1 is darkest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(grid(title, shares), encoding="utf-8")


def grid(title: str, shares: Mapping[str, Mapping[int, float]]) -> str:
    columns = sorted({column for row in shares.values() for column in row})
    cell_width, cell_height, left, top = 64, 20, 140, 56
    width, height = left + cell_width * len(columns) + 16, top + cell_height * len(shares) + 12
    parts = [_text(left, 20, title, weight="bold")]
    parts += [_text(left + cell_width * (i + 0.5), 44, str(column), "middle") for i, column in enumerate(columns)]
    for j, (name, row) in enumerate(shares.items()):
        y = top + cell_height * j
        parts.append(_text(left - 8, y + 14, name, "end"))
        for i, column in enumerate(columns):
            if column in row:
                x, share = left + cell_width * i, min(1.0, max(0.0, row[column]))
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{cell_width - 2}" height="{cell_height - 2}" '
                    f'fill="#1c7ed6" fill-opacity="{share**2:.2f}"/>'
                )
                parts.append(_text(x + cell_width / 2, y + 14, f"{100 * row[column]:.0f} %", "middle"))
    return _document(width, height, parts)


def _document(width: int, height: int, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(
    x: float, y: float, text: str, anchor: str = "start", *, weight: str = "normal", colour: str = "#212529"
) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
