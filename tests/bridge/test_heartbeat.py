"""Who is taken for hung, and who is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from photon_grpc.bridge import heartbeat
from photon_grpc.bridge.heartbeat import TICK_S, SharedHeartbeat, Watchdog


@pytest.fixture
def watchdog():
    watchdog = Watchdog()
    yield watchdog
    watchdog.close()


@pytest.fixture
def child(watchdog):
    return SharedHeartbeat(os.dup(watchdog.fd))


def ticks(watchdog: Watchdog, seconds: float) -> list[str]:
    return [told for _ in range(round(seconds / TICK_S)) if (told := watchdog.tick())]


def test_no_child_is_watched_before_its_first_beat(watchdog, child):
    assert ticks(watchdog, 1000.0) == []


def test_silence_is_measured_from_the_last_beat_against_its_own_limit(watchdog, child):
    child.beat(5.0)
    assert ticks(watchdog, 5.0) == []
    child.beat(20.0, 512)
    assert ticks(watchdog, 20.0) == []
    (told,) = ticks(watchdog, 1.0)
    assert "512 tokens" in told
    assert "20.0 s were allowed" in told


def test_a_child_that_beats_is_never_late(watchdog, child):
    for _ in range(100):
        child.beat(1.0)
        assert ticks(watchdog, 1.0) == []


def test_a_child_that_does_not_end_is_reported_again_but_rarely(watchdog, child):
    child.beat(5.0)
    assert len(ticks(watchdog, 26.5)) == 5


@pytest.mark.parametrize("has_memfd", [True, False])
def test_a_beat_crosses_to_another_process(monkeypatch, has_memfd):
    if not has_memfd:
        monkeypatch.delattr(heartbeat.os, "memfd_create", raising=False)
    watchdog = Watchdog()
    program = (
        "import sys; from photon_grpc.bridge.heartbeat import SharedHeartbeat; "
        "SharedHeartbeat(int(sys.argv[1])).beat(1.0, 7)"
    )
    subprocess.run([sys.executable, "-c", program, str(watchdog.fd)], pass_fds=(watchdog.fd,), check=True)
    (told,) = ticks(watchdog, 2.0)
    assert "7 tokens" in told
    watchdog.close()
    watchdog.close()


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 9)", -9), ("os._exit(3)", 3), ("os._exit(0)", None)])
def test_the_code_of_a_child_is_known_before_its_parent_asks_for_it(end, code):
    program = f"import os, sys; print(flush=True); sys.stdin.read(); {end}"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert heartbeat.exit_code(child.pid) is None
    child.stdin.close()
    # Waits for its end, and leaves the code where it is.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert heartbeat.exit_code(child.pid) == code
    child.wait()
    child.stdout.close()
    assert heartbeat.exit_code(child.pid) is None
