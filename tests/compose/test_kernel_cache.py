"""Compiled kernels are cached somewhere, whatever home there is, and never in a directory of another user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from photon_grpc.compose.kernel_cache import ensure_writable
from photon_grpc.errors import ConfigError


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a temporary directory, with no variable that names a cache."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    # So that what is set is taken back.
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_HOME", raising=False)
    return directory


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """Return a path below which nothing can be created, not even by root."""
    file = tmp_path / "file"
    file.touch()
    return file / "below"


def chosen() -> Path:
    ensure_writable()
    return Path(os.environ["TRITON_CACHE_DIR"])


def test_a_home_that_can_be_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ensure_writable()
    assert os.environ["TRITON_CACHE_DIR"] == ""


def test_a_directory_that_was_asked_for_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tmp_path / "volume" / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(wanted))
    assert chosen() == wanted and wanted.is_dir()


@pytest.mark.parametrize("variable", ["HOME", "TRITON_HOME", "TRITON_CACHE_DIR"])
def test_one_that_cannot_be_written_is_replaced_by_the_same_at_every_start(
    variable: str, unwritable: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, str(unwritable))
    first = chosen()
    assert first.parent == temporary and first.stat().st_mode & 0o777 == 0o700
    assert "set TRITON_CACHE_DIR" in caplog.text
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv(variable, str(unwritable))
    assert chosen() == first


def test_without_a_home_nothing_is_made_below_a_tilde(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert chosen().parent == temporary
    assert not (tmp_path / "~").exists()


def test_a_directory_that_others_can_write_is_not_taken(
    unwritable: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = temporary / f"photon-grpc-kernels-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    monkeypatch.setenv("HOME", str(unwritable))
    assert chosen() != planted


def test_where_nothing_can_be_written_the_variable_is_named(unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(unwritable))
    monkeypatch.setattr(tempfile, "tempdir", str(unwritable))
    with pytest.raises(ConfigError, match="set TRITON_CACHE_DIR"):
        ensure_writable()
