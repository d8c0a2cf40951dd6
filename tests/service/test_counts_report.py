"""What a front end tells of itself while nobody calls it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

from photon_grpc.bridge.control import ControlChannel, Counted
from photon_grpc.core.counts import Counts, Sums
from photon_grpc.core.stats import Load
from photon_grpc.observe.metrics import LOOP_LAG_S, REQUESTS_BY_LABEL
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


def test_reports_of_long_labels_fit_the_control_channel() -> None:
    counts = Counts()
    values = [f"{chr(0x1F600 + number)}" * 128 for number in range(64)]
    for key in range(16):
        for value in values:
            counts.add(REQUESTS_BY_LABEL, f"key{key}", value, "answered")
    near, far = socket.socketpair()
    far.settimeout(120)
    sender, receiver = ControlChannel(near), ControlChannel(far)
    report = CountsReport(sender, cast("Any", SimpleNamespace(on_state=lambda callback: None, load=Load())), counts)
    sums = Sums()
    reading = threading.Thread(target=_read_all, args=(receiver, sums, 16 * 64))
    reading.start()
    while counts.changed():
        report.send()
    reading.join(120)
    assert len(sums.of(REQUESTS_BY_LABEL)) == 16 * 64
    sender.close()
    receiver.close()


def _read_all(receiver: ControlChannel, sums: Sums, num_series: int) -> None:
    while len(sums.of(REQUESTS_BY_LABEL)) < num_series:
        for message in receiver.receive():
            assert isinstance(message, Counted)
            sums.update(0, message.series)
