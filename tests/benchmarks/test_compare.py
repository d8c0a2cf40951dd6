"""Two result files are compared figure by figure: by heading, row and column."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import compare

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


def compared(tmp_path: Path, after: str, monkeypatch: pytest.MonkeyPatch, percent: str = "3") -> int:
    (tmp_path / "a.md").write_text(BEFORE)
    (tmp_path / "b.md").write_text(after)
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "a.md"), str(tmp_path / "b.md"), "--percent", percent])
    return compare.main()


def test_figures_are_named_by_heading_row_and_column() -> None:
    assert compare.figures(BEFORE) == {
        ("1b", "1", "ms/step"): 0.7,
        ("1b", "1", "tok/s"): 1400.0,
        ("1b", "8", "ms/step"): 0.73,
        ("1b", "8", "tok/s"): 10773.0,
        ("1b", "8", "peer"): 0.55,
        ("8b", "1", "ms/step"): 3.75,
    }


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
