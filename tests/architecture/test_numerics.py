"""A change of sources that decide bits comes with another number, or with the word that all bits are the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from photon_grpc.runner.numerics import NUMERICS

from . import numerics

ONE = '''
"""A file."""
def add(a, b):
    """Add."""
    return a + b  # in this order
'''


def test_the_number_rises_when_sources_change_that_decide_bits() -> None:
    files = numerics.changed(numerics.digests())
    assert not files, numerics.advice(files)
    assert numerics.recorded()["number"] == NUMERICS, "NUMERICS has changed: python -m tests.architecture.numerics"


def test_every_pattern_finds_sources_of_every_folder_that_computes() -> None:
    for pattern in numerics.SOURCES:
        assert list(numerics.PACKAGE.glob(pattern)), f"{pattern} matches no file"
    found = set(numerics.digests())
    computing = {
        path for package in ("kernels", "layers", "models") for path in (numerics.PACKAGE / package).rglob("*.py")
    }
    assert {str(path.relative_to(numerics.PACKAGE)) for path in computing} <= found


@pytest.mark.parametrize(
    "same",
    [
        ONE.replace('"""Add."""\n    ', ""),
        ONE.replace('"""A file."""', ""),
        ONE.replace("  # in this order", ""),
        ONE.replace("return a + b", "return (\n        a\n        + b\n    )"),
    ],
    ids=["docstring", "head", "comment", "layout"],
)
def test_what_is_written_for_people_does_not_count(same: str) -> None:
    assert same != ONE and numerics.digest_of(same) == numerics.digest_of(ONE)


@pytest.mark.parametrize(
    "other",
    [
        ONE.replace("a + b", "b + a"),
        ONE.replace("a + b", "a - b"),
        ONE.replace("a, b", "a, b=None"),
        ONE.replace("return a + b", "return a + b + 0.0"),
        ONE.replace("return a + b", "return a + b + 0"),
    ],
)
def test_what_is_computed_counts(other: str) -> None:
    assert numerics.digest_of(other) != numerics.digest_of(ONE)
    assert numerics.digest_of(ONE.replace("a + b", "a + b + 0")) != numerics.digest_of(
        ONE.replace("a + b", "a + b + 0.0")
    )


def test_changed_new_and_missing_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "photon_grpc"
    shutil.copytree(numerics.PACKAGE / "kernels", package / "kernels")
    (package / "kernels" / "embed.py").write_text("x = 1\n")
    (package / "kernels" / "another.py").write_text("x = 1\n")
    files = numerics.changed(numerics.digests(package))
    assert {"kernels/embed.py", "kernels/another.py", "config/rope.py"} <= set(files)
    assert "kernels/rms_norm.py" not in files
    told = numerics.advice(files)
    for words in ("kernels/another.py", "raise NUMERICS", "benchmarks/golden.py", "--same-bits"):
        assert words in told
