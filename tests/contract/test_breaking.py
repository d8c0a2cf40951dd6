"""A change of the protos that breaks callers is refused."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
BUF = Path(sys.executable).parent / "buf"
pytestmark = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")


def compared(protos: Path) -> subprocess.CompletedProcess[str]:
    command = [str(PROTOS / "check_breaking.sh"), str(protos)]
    return subprocess.run(command, env={**os.environ, "BUF": str(BUF)}, capture_output=True, text=True)


def test_the_protos_keep_to_the_baseline() -> None:
    result = compared(PROTOS)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  string salt = 2", "  string pepper = 2"),
        ("  string salt = 2", "  string salt = 9"),
        ("  string salt = 2", "  bytes salt = 2"),
        ("  FINISH_REASON_ABORTED = 8;", ""),
    ],
    ids=["renamed", "renumbered", "retyped", "removed"],
)
def test_a_broken_field_is_named(old: str, new: str, tmp_path: Path) -> None:
    shutil.copytree(PROTOS, tmp_path / "protos")
    path = tmp_path / "protos" / "photon_grpc" / "v1" / "inference.proto"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    result = compared(tmp_path / "protos")
    assert result.returncode and "inference.proto" in result.stdout, result.stderr


def test_the_changelog_names_the_baseline() -> None:
    digest = hashlib.sha256((PROTOS / "baseline.binpb").read_bytes()).hexdigest()[:16]
    assert digest in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
