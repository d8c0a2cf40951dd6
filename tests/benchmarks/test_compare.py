"""Two result files are compared figure by figure: by heading, row and column."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.saved import RESULTS

BEFORE = """# before

`python -m x`, 2026-01-01

## 1b

| batch | ms/step | tok/s | peer |
|--:|--:|--:|--:|
| 1 | 0.700 | 1,400 | – |
| 8 | 0.730 | 10,773 | 0.55 |

## 8b

| batch | ms/step |
|--:|--:|
| 1 | 3.75 |
"""


def compared(
    tmp_path: Path, after: str, monkeypatch: pytest.MonkeyPatch, percent: str = "3", before: str = BEFORE
) -> int:
    (tmp_path / "a.md").write_text(before)
    (tmp_path / "b.md").write_text(after)
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "a.md"), str(tmp_path / "b.md"), "--percent", percent])
    return compare.main()


def values(before: str, after: str = "") -> dict[str, float]:
    """The figures of a text by their names, as it is compared with another."""
    return {" · ".join(map(str, name)): figure.value for name, figure, _ in compare.compared(before, after or before)}


def lines(before: str, after: str) -> list[str]:
    """What is said of figures that moved by more than 3 %."""
    return [line for each in compare.compared(before, after) if (line := compare.moved(*each, percent=3))]


def table(*rows: str) -> str:
    """The first row has the columns."""
    return "\n".join(f"| {row} |" for row in (rows[0], "--|--", *rows[1:])) + "\n"


def test_figures_are_named_by_heading_row_and_column() -> None:
    assert values(BEFORE) == {
        "1b · 1 · ms/step · 0": 0.7,
        "1b · 1 · tok/s · 0": 1400.0,
        "1b · 8 · ms/step · 0": 0.73,
        "1b · 8 · tok/s · 0": 10773.0,
        "1b · 8 · peer · 0": 0.55,
        "8b · 1 · ms/step · 0": 3.75,
    }


def test_a_row_is_named_by_the_cells_that_tell_the_rows_apart_in_both_files() -> None:
    few, more = (
        table("rows | context | ms", "1 | 8,200 | 5"),
        table("rows | context | ms", "1 | 272 | 3", "1 | 8,200 | 5"),
    )
    assert values(more) == {" · 1 · 272 · ms · 0": 3, " · 1 · 8,200 · ms · 0": 5}
    assert values(few, more) == {" · 1 · 8,200 · ms · 0": 5}
    assert not lines(few, more)
    assert lines(more, few) == ["1 · 272 · ms: 3 → missing"]
    assert lines(more, more.replace("| 5 |", "| 6 |")) == ["1 · 8,200 · ms: 5 → 6 (+20.0 %)"]


def test_rows_and_columns_of_one_name_are_counted() -> None:
    text = table("model | ms | ms", "a | 1 | 2", "a | 1 | 2")
    assert list(values(text)) == [" · a · ms · 0", " · a · ms (2) · 0", " · a (2) · ms · 0", " · a (2) · ms (2) · 0"]


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("142 / **42**", {0: 142, 1: 42}),
        ("– / 25", {1: 25}),
        ("0.730 (+0.025, +3.5%)", {0: 0.73}),
        ("1,369, 1,372", {0: 1369, 1: 1372}),
        ("0.46–0.55", {0: 0.46, 1: 0.55}),
        ("1.43× – 1.49×", {0: 1.43, 1: 1.49}),
        ("-4.9", {0: -4.9}),
        ("−4.9", {0: -4.9}),
        ("+78", {0: 78}),
        ("cb203d6, 1b55430, Qwen3", {}),
        ("–", {}),
    ],
)
def test_every_number_outside_parentheses_is_a_figure(cell: str, found: dict[int, float]) -> None:
    assert compare.numbers(cell) == found


def test_each_figure_of_a_cell_moves_by_itself() -> None:
    text = table("streams | TTFT p50 / p99 ms", "64 | 142 / **42**")
    assert lines(text, text.replace("42**", "50**")) == ["64 · TTFT p50 / p99 ms [2]: 42 → 50 (+19.0 %)"]
    assert lines(text, text.replace("/ **42**", "")) == ["64 · TTFT p50 / p99 ms [2]: 42 → missing"]


def test_differences_move_by_shares_of_what_they_are_differences_of() -> None:
    text = table("rows | chosen µs | floor µs | above µs | behind %", "8 | 100.0 | 99.5 | 0.5 | -0.2")
    assert not lines(text, text.replace("0.5 |", "2.5 |").replace("-0.2", "1.9"))
    after = text.replace("| 0.5 |", "| 4.5 |").replace("-0.2", "4.8")
    assert lines(text, after) == ["8 · above µs: 0.5 → 4.5 (+4)", "8 · behind %: -0.2 → 4.8 (+5)"]


def test_a_difference_is_set_against_figures_of_its_own_unit() -> None:
    text = table("read by | tok/s | p50, µs | over raw stubs, µs", "Client | 90,000 | 765 | +78")
    assert not lines(text, text.replace("+78", "+100"))
    assert lines(text, text.replace("+78", "+102")) == ["Client · over raw stubs, µs: 78 → 102 (+24)"]


def test_what_a_start_measures_is_no_part_of_a_heading() -> None:
    head = "## 1b on a GPU, bfloat16, 62502 KV blocks of 64, kernels triton, loaded in 9.6 s; flags: x\n"
    text = head + table("rows | ms", "1 | 5")
    assert lines(text, text.replace("62502", "62569").replace("9.6", "3.2").replace("| 5", "| 6")) == [
        "1b on a GPU, bfloat16, kernels triton; flags: x · 1 · ms: 5 → 6 (+20.0 %)"
    ]


def test_tables_are_found_again_by_their_columns_where_headings_differ() -> None:
    first, second = table("batch | ms", "1 | 5"), table("batch | s", "1 | 7")
    assert not lines(first + "\n" + second, f"## 1b\n{second}\n{first}")
    several = f"## 1b\n{first}\n## 8b\n{first}"
    assert lines(first, several) == ["1 · ms: 5 → missing"]
    # A column more is no other table.
    assert not lines(f"## 1b\n{first}", "## 1b\n" + table("batch | ms | peer", "1 | 5 | 9"))


@pytest.mark.parametrize(
    ("before", "after"), [("# a\n\n1.5 ms\n", BEFORE), (BEFORE, "# b\n"), (BEFORE, table("x | y", "1 | 2"))]
)
def test_where_nothing_was_compared_one_line_says_so(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tmp_path, after, monkeypatch, before=before) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("nothing was compared: ")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_no_result_differs_from_itself_and_every_figure_beside_the_names_is_compared(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = list(compare.compared(text, text))
    assert not lines(text, text)
    rows = [row for each in compare.tables(text) for row in each.rows]
    assert len(found) >= sum(bool(compare.numbers(row[-1])) for row in rows if len(row) > 1)


def test_a_file_under_another_title_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tmp_path, BEFORE.replace("# before", "# after").replace("0.700", "0.715"), monkeypatch) == 0
    assert capsys.readouterr().out == "0 of 6 figures moved by more than 3 %\n"


def test_each_figure_that_moved_or_is_missing_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after = BEFORE.replace("0.730", "0.803").replace("| 1 | 3.75 |", "")
    assert compared(tmp_path, after, monkeypatch) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1b · 8 · ms/step: 0.73 → 0.803 (+10.0 %)",
        "8b · 1 · ms/step: 3.75 → missing",
        "2 of 6 figures moved by more than 3 %",
    ]
