"""How the engine process ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, time
from types import SimpleNamespace
from photon_grpc.service.processes import engine

def run(*args):
    raise error

engine.enter_child = lambda argv: SimpleNamespace(control=SimpleNamespace(send=print))
engine._run = run
atexit.register(time.sleep, 600)
error = RuntimeError("CUDA error: device-side assert triggered")
engine.main([])
"""


def test_a_crash_ends_the_process_without_waiting_for_what_is_to_be_released() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 1
    assert "device-side assert" in done.stderr
