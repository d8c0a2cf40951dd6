"""`photon-grpc quarantine`: what it tells, and what it has forgotten."""

from __future__ import annotations

import time

import pytest

from photon_grpc.cli.main import main
from photon_grpc.core.frames import Suspect
from tests.cli.test_top import Admin, admin  # noqa: F401


def test_what_is_in_quarantine_is_a_table(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["quarantine"]) == 0
    assert capsys.readouterr().out == "nothing is in quarantine\n"
    now_s = time.time()
    admin.frontend.suspects = (
        Suspect("ab" * 16, True, 2, now_s, 3600.0, "abc", "search"),
        Suspect("cd" * 16, False, 1, now_s, 600.0),
    )
    assert main(["quarantine"]) == 0
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "fingerprint"
    assert first.split()[:3] == ["ab" * 16, "quarantined", "2"]
    assert first.split()[-4:] == ["60", "min", "search", "abc"]
    assert second.split()[:3] == ["cd" * 16, "suspect", "1"] and second.split()[-2:] == ["-", "-"]


def test_clearing_lists_what_was_cleared(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["quarantine", "--clear", "ab", "--clear", "cd"]) == 0
    assert capsys.readouterr().out == "cleared ab\ncleared cd\n"
    assert main(["quarantine", "--clear-all", "--target", admin.address]) == 0
    assert main(["quarantine", "--clear-all", "--clear", "ab"]) == 2
    assert admin.frontend.orders == [("clear_quarantine", ("ab", "cd")), ("clear_quarantine", ())]


def test_names_unknown_to_the_server_are_reported(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["quarantine", "--clear", "x" * 65]) == 2
    assert f"knows no request {'x' * 65}" in capsys.readouterr().err
