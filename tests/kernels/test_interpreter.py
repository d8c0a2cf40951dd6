"""Runs `tests/kernels/interpreted` in a process of its own: Triton reads TRITON_INTERPRET when kernels are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

pytest.importorskip("triton")


# A minute of computing in one process, which is five on a machine that is busy.
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already inside the interpreter")
def test_kernels_equal_their_references_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    here = Path(__file__).parent
    profile = f"--hypothesis-profile={settings.get_current_profile_name()}"
    options = ["-q", "-p", "no:cacheprovider", profile, "-m", pytestconfig.getoption("markexpr")]
    command = [sys.executable, "-m", "pytest", *options, str(here / "interpreted")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, cwd=here.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
