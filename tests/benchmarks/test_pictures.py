"""Pictures show what their tables say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import pictures
from benchmarks.pictures import PICTURES, Curves, Line, Shares, number, points, tables
from benchmarks.saved import RESULTS

TABLE = """# Title

| n | ours | peers a / b |
|--:|--:|--:|
| 64 | 2,000.5 (+1 %) | 20 / 30 |
| 1 | 1,000 | 10 / – |
| 8 | – | 15 / 25 |

## Second

| n | ours |
|--:|--:|
| 1 | 7 |
"""
CURVES = Curves("t", "A title", "n", (Line("photon_grpc", "ours"),), "tok/s")


def test_tables_are_read_with_their_headings() -> None:
    (first, rows), (second, more) = tables(TABLE)
    assert (first, second) == ("Title", "Second")
    assert [row["n"] for row in rows] == ["64", "1", "8"]
    assert more == [{"n": "1", "ours": "7"}]


def test_points_are_the_numbers_of_the_cells() -> None:
    rows = tables(TABLE)[0][1]
    assert points(rows, "n", Line("x", "ours")) == [(1, 1000), (64, 2000.5)]
    assert points(rows, "n", Line("x", "peers a / b", 1)) == [(8, 25), (64, 30)]
    assert points(rows, "n", Line("x", "ours", only=("n", "1"))) == [(1, 1000)]
    assert number("–") is None
    with pytest.raises(ValueError, match="no ms over n"):
        points(rows, "n", Line("x", "ms"))


def test_every_line_is_drawn() -> None:
    lines = tuple(Line(f"line {index}", "ours") for index in range(6))
    (axes,) = pictures.draw(replace(CURVES, lines=lines), TABLE).axes
    assert [line.get_label() for line in axes.lines] == [line.name for line in lines]
    assert len({line.get_color() for line in axes.lines}) == len(lines)
    assert [tuple(point) for point in axes.lines[0].get_xydata()] == [(1, 1000), (64, 2000.5)]
    (second,) = pictures.draw(replace(CURVES, heading="Second"), TABLE).axes
    assert [tuple(point) for point in second.lines[0].get_xydata()] == [(1, 7)]


def test_a_share_is_one_column_of_another() -> None:
    head = "| n | x | y |\n|--|--|--|\n"
    text = f"## a\n{head}| 1 | 5 | 10 |\n| 8 | 1 | 4 |\n## b\n{head}| 8 | 9 | 9 |\n"
    (axes,) = pictures.draw(Shares("t", "A title", "n", "x", "y"), text).axes
    assert [text.get_text() for text in axes.texts] == ["50 %", "25 %", "100 %"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.full
def test_every_picture_is_drawn_from_its_table_and_shown_beside_it(name: str, tmp_path: Path) -> None:
    table = RESULTS / f"{PICTURES[name].table}.md"
    assert f"({name}.svg)" in table.read_text(encoding="utf-8")
    (tmp_path / table.name).write_text(table.read_text(encoding="utf-8"), encoding="utf-8")
    fresh = pictures.write(name, tmp_path).read_text(encoding="utf-8")
    assert fresh == pictures.write(name, tmp_path).read_text(encoding="utf-8")
    assert PICTURES[name].title in fresh


def test_no_picture_lies_there_without_a_table() -> None:
    assert {path.stem for path in RESULTS.glob("*.svg")} == set(PICTURES)
