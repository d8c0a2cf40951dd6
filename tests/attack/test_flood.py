"""Eight hostile callers send large messages for a while: a neighbour with small requests is served meanwhile, and
memory has an end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.attack.figures import Figures
from tests.attack.hostile_caller import KINDS
from tests.attack.neighbour import ROOT, neighbour
from tests.attack.size import LONG, SHORT, Size
from tests.attack.victim import Victim, forget_peak, memory_mib

#: Callers end by themselves after their time, their last call and the building of their messages.
_LAST_CALL_S = 60.0
#: What docs/operations.md states: the most that a front end holds above what it has at rest, whatever callers send.
_MOST_MIB = 1_024


@pytest.mark.parametrize(
    "num_bytes",
    [pytest.param(n, marks=() if n in SHORT.flood_bytes else pytest.mark.long_attack) for n in LONG.flood_bytes],
)
def test_a_neighbour_of_hostile_callers_is_served(
    attacked: Victim, size: Size, figures: Figures, num_bytes: int
) -> None:
    frontend = attacked.pids()["frontend"]
    forget_peak(frontend)
    rest_mib = memory_mib(frontend)
    with attacked.unharmed():
        with neighbour(attacked.address) as beside:
            told = flooded(attacked.address, num_bytes, size.flood_s, size.flood_processes)
        lives = attacked.pids()["frontend"] == frontend
        peak_mib = memory_mib(frontend, "VmHWM") if lives else 0.0
        left_behind = (
            f"front end: {rest_mib:,.0f} MiB, at most {peak_mib:,.0f}" if lives else "a front end was replaced"
        )
        sent = f"8 callers, {num_bytes >> 20} MiB each, {size.flood_s:g} s"
        figures.add("flood", sent, told, neighbour=beside.told(), left_behind=left_behind)
    assert beside.failed == []
    assert max(beside.generate_s) < size.neighbour_s
    assert max(beside.health_s) < size.neighbour_s
    assert peak_mib < rest_mib + _MOST_MIB
    assert not {"INTERNAL", "UNKNOWN", "INTERNAL_FAILURE"} & told.keys()


def flooded(address: str, num_bytes: int, seconds: float, num_processes: int) -> Counter[str]:
    """What came back to all of them."""
    kinds = list(KINDS)
    callers = [caller(address, num_bytes, seconds, kinds[index::num_processes]) for index in range(num_processes)]
    told: Counter[str] = Counter()
    try:
        for process in callers:
            said, _ = process.communicate(timeout=seconds + _LAST_CALL_S)
            assert process.returncode == 0
            told.update(json.loads(said))
    finally:
        for process in callers:
            process.kill()
            process.wait()
    return told


def caller(address: str, num_bytes: int, seconds: float, kinds: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.attack.hostile_caller", address, str(num_bytes), str(seconds), *kinds]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
