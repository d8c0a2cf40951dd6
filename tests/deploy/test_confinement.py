"""The service without any writable place.

The root is read-only, /dev/shm is empty, there is no home, and the user is an unknown number (as in OpenShift).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.service.running import ROOT, RunningService, client, started

#: A namespace of mounts in which it is so, then one of users.
_CONFINED = """
set -e
mount -o remount,ro,bind /
for place in $(awk '$4 ~ /^rw/ && $3 ~ /^(tmpfs|ext4|xfs|overlay|btrfs)$/ {print $2}' /proc/self/mounts); do
    mount -o remount,ro,bind "$place"
done
mount -t tmpfs -o ro,size=4k tmpfs /dev/shm
exec unshare --user --map-user=12345 --map-group=12345 env -u HOME -u USER -u LOGNAME -u XDG_RUNTIME_DIR "$@"
"""
CONFINED = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _CONFINED, "sh"]


def is_allowed() -> bool:
    try:
        script = "test $(id -u) = 12345 && ! touch /tmp/x /dev/shm/x 2>/dev/null"
        return subprocess.run([*CONFINED, "sh", "-c", script], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


pytestmark = pytest.mark.skipif(not is_allowed(), reason="no user namespaces here")


@pytest.fixture
def confined() -> Iterator[RunningService]:
    flags = ["--listen", "127.0.0.1:0", "--device", "cpu", "--num-blocks", "64"]
    with started([*CONFINED, sys.executable, "-m", "photon_grpc", "serve", *flags]) as service:
        yield service


@pytest.mark.full
def test_it_serves_and_says_what_it_goes_without(confined: RunningService) -> None:
    (address,) = confined.wait_ready()
    with client(address) as call:
        assert call.generate("def fib", max_tokens=5).usage.output_tokens == 5
    assert any("no admin service" in line for line in confined.lines)
    assert confined.end() == 0


@pytest.mark.full
def test_doctor_tells_all_and_a_model_in_no_home_is_a_line() -> None:
    def said(*words: str) -> tuple[int, str]:
        command = [*CONFINED, sys.executable, "-m", "photon_grpc", *words]
        done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, told = said("doctor", "--device", "cpu", "--listen", "127.0.0.1:0")
    assert code == 0 and "LlamaForCausalLM" in told and "Traceback" not in told
    code, told = said("serve", "--model", "~/models/mine")
    assert (code, len(told.splitlines())) == (2, 1)
