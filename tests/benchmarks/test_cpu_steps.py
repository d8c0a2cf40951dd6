"""Steps of several formats on a CPU: a row for each."""

from __future__ import annotations

import pytest

from benchmarks import cpu_steps


def test_every_format_has_a_row_beside_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--shape", "demo", "--formats", "bfloat16", "int8+head", "--threads", "1", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["cpu_steps", *flags])
    cpu_steps.main()
    printed = capsys.readouterr().out
    assert "| 1 | bfloat16 |" in printed
    assert "| 1 | int8+head |" in printed
    assert "--quantization int8 --quantization-head int8" in printed
