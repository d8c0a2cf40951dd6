"""The digests that are kept of every kind of device, and what a check says of them. Computing them needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import golden
from photon_grpc.core.numerics import Numerics

NUMERICS = Numerics(number=1, mode="strict", device="9.0").signed()
CASES = {"1b graphs decode 1 plain": "a", "1b graphs decode 2 plain": "b", "1b graphs mixed 60 7 plain": "c"}


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "KEPT", tmp_path / "golden.json")


def test_cases_are_shortened_by_kind_of_step() -> None:
    now = golden.shortened(CASES)
    assert list(now) == ["1b graphs decode plain", "1b graphs mixed plain"]
    other = golden.shortened(CASES | {"1b graphs decode 2 plain": "x"})
    assert [name for name in now if now[name] != other[name]] == ["1b graphs decode plain"]
    swapped = golden.shortened(CASES | {"1b graphs decode 1 plain": "b", "1b graphs decode 2 plain": "a"})
    assert swapped["1b graphs decode plain"] != now["1b graphs decode plain"]


def test_a_check_names_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    now = golden.shortened(CASES)
    assert golden.check("H200", NUMERICS, now) == 1 and "nothing is kept for H200" in capsys.readouterr().out
    golden.record("H200", NUMERICS, now)
    assert golden.check("H200", NUMERICS, now) == 0
    capsys.readouterr()
    assert golden.check("H200", NUMERICS, now | {"1b graphs mixed plain": "x"}) == 1
    told = capsys.readouterr().out
    assert "1b graphs mixed plain" in told and "decode" not in told


def test_digests_of_another_version_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    now, other = golden.shortened(CASES), Numerics(number=2, mode="strict", device="9.0").signed()
    golden.record("H200", NUMERICS, now)
    assert golden.check("H200", other, now) == 1
    assert other.version in capsys.readouterr().out
    golden.record("H200", other, {"8b eager logits": "d"})
    assert golden.kept()["H200"]["digests"] == {"8b eager logits": "d"}
    golden.record("H200", other, now)
    assert golden.kept()["H200"]["digests"] == now | {"8b eager logits": "d"}


def test_devices_with_one_version_have_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is promised: the version has every property of a device that may decide bits."""
    monkeypatch.undo()
    found: dict[tuple[str, str], set[str]] = {}
    for entry in golden.kept().values():
        for name, digest in entry["digests"].items():
            found.setdefault((entry["numerics_version"], name), set()).add(digest)
    assert [key for key, digests in found.items() if len(digests) > 1] == []
