"""A machine that lacks what others have: the service starts, answers and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.running import READINESS, ROOT, SERVING, client, wait_until
from tests.service.tiny import write_tiny_model

#: A place of its own for what is mounted; no shared memory, a full disk under the log, few descriptors.
_POOR = 'mount -t tmpfs -o ro,size=4k none /dev/shm && ulimit -n 64 && exec "$@" 2> /dev/full'
_UNSHARED = ("unshare", "--mount", "sh", "-c")


def may_mount() -> bool:
    """Containers often may not."""
    try:
        return not subprocess.run([*_UNSHARED, _POOR, "sh", "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


@pytest.mark.skipif(not may_mount(), reason="mounting is not allowed here")
def test_no_shared_memory_few_descriptors_and_a_full_disk(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    model = write_tiny_model(tmp_path / "tiny")
    serve = [sys.executable, "-m", "photon_grpc", "serve", "--model", str(model), "--load-format", "dummy"]
    flags = ["--device", "cpu", "--num-blocks", "64", "--listen", address]
    process = subprocess.Popen([*_UNSHARED, _POOR, "sh", *serve, *flags], cwd=ROOT, env=os.environ)
    try:
        with client(address) as call:
            wait_until(lambda: call.health(READINESS) == SERVING, "ready")
            streams = [call.stream(max_tokens=40) for _ in range(30)]
            assert all(len(list(stream)) for stream in streams)
            assert call.generate().usage.output_tokens == 4
        process.terminate()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
