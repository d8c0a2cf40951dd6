"""Mixed traffic for a long time: afterwards every process holds what it held."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from tests.attack.figures import Figures
from tests.attack.size import Size
from tests.attack.traffic import traffic
from tests.attack.victim import Victim
from tests.attack.vitals import Held, Series, held, processes
from tests.service.running import wait_until

_NUM_CALLERS = 20
_SAMPLE_S = 10.0
#: Of the time before it is counted: pools fill, and caches of kernels and grammars.
_WARM_UP = 0.2
#: Growth of a process that is none.
_SPARE_MIB = 64.0
_KINDS = {
    *("whole", "read", "leave", "hurry", "dawdle", "share", "constrain", "tokenize", "vanish", "read nothing"),
}


@pytest.fixture
def seconds(request: pytest.FixtureRequest, size: Size) -> float:
    return request.config.getoption("--soak") or size.soak_s


@pytest.mark.timeout(0)
async def test_nothing_is_left_of_mixed_traffic(attacked: Victim, size: Size, seconds: float, figures: Figures) -> None:
    series = Series()
    with attacked.unharmed():
        await traffic(attacked.address, _NUM_CALLERS, 0, seconds * _WARM_UP)
        attacked.owns_nothing()
        before = processes(attacked)
        series.take(attacked)
        told = await _watched(attacked, seconds, series)
        attacked.owns_nothing()
        first = series.samples[0]
        try:
            wait_until(lambda: not _surplus(attacked, first), "what is held is given back", 60)
        except TimeoutError:
            raise AssertionError(f"still held: {', '.join(_surplus(attacked, first))}; {series.told()}") from None
        series.take(attacked)
        assert processes(attacked) == before
    calls = f"{seconds:g} s, {_NUM_CALLERS} callers, {told.total():,} calls"
    figures.add("soak", calls, told, left_behind=series.told())
    assert set(told) == _KINDS
    last = series.samples[-1]
    assert all(last[role].memory_mib < first[role].memory_mib + _SPARE_MIB for role in first), series.told()


async def _watched(attacked: Victim, seconds: float, series: Series) -> Counter[str]:
    """What callers of every kind were told, with a sample taken every now and then."""
    traffic_of_all = asyncio.create_task(traffic(attacked.address, _NUM_CALLERS, 1, seconds))
    while not (await asyncio.wait([traffic_of_all], timeout=_SAMPLE_S))[0]:
        series.take(attacked)
    return traffic_of_all.result()


def _surplus(attacked: Victim, before: dict[str, Held]) -> list[str]:
    # Channels of the callers in this process close their connections only once they are collected.
    gc.collect()
    now = held(attacked)
    return [what for role in before for what in now[role].surplus(before[role])]
