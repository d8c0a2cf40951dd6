"""The benchmark of what telling costs."""

from __future__ import annotations

import pytest

from benchmarks import telemetry


@pytest.mark.full
def test_what_telling_costs_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.table(3)
    figures = [float(line.split("|")[2]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(figures) == 6 and figures[-1] > 0
