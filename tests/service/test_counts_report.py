"""What a front end tells of itself while nobody calls it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from photon_grpc.core.counts import Counts
from photon_grpc.core.stats import Load
from photon_grpc.server.observe.metrics import LOOP_LAG_S
from photon_grpc.service.processes.counts_report import CountsReport


async def test_what_holds_the_event_loop_up_is_seen() -> None:
    counts = Counts()
    frontend: Any = SimpleNamespace(on_state=lambda callback: None, load=Load())
    control: Any = SimpleNamespace(send=lambda message: None)
    keeping = asyncio.create_task(CountsReport(control, frontend, counts).keep())
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251  # this is what is looked for
    await asyncio.sleep(0.06)
    keeping.cancel()
    (lag,) = [series.values for series in counts.changed() if series.name == LOOP_LAG_S.name]
    assert sum(lag[:-1]) >= 1 and lag[-1] >= 0.24
