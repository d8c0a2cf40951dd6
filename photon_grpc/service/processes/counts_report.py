"""A front end's reports of its counts to the supervisor, which keeps them when the front end dies."""

from __future__ import annotations

import asyncio
import time

from photon_grpc.bridge.control import ControlChannel, Counted
from photon_grpc.core.counts import Counts
from photon_grpc.core.stats import Load
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.readiness import State
from photon_grpc.observe.metrics import LOOP_LAG_S

#: A front end that is killed loses the counts since its last report.
INTERVAL_S = 0.5
#: Interval at which the delay of the event loop is measured; every longer delay is noticed.
_LAG_INTERVAL_S = 0.05
#: Callers' labels may make a series of 700 bytes; a message of the control channel holds 128 KiB.
_SERIES_A_MESSAGE = 64
#: Leaves room for other messages among those that the channel keeps unsent.
_MESSAGES_A_REPORT = 16


class CountsReport:
    """The reports of one front end, on its event loop."""

    def __init__(self, control: ControlChannel, frontend: Frontend, counts: Counts) -> None:
        self._control = control
        self._frontend = frontend
        self._counts = counts
        self._sent: tuple[int, Load] | None = None
        #: The life of the engine to which the front end is connected.
        self.life = 0
        # Reports the last Load of an engine that has ended.
        frontend.on_state(lambda state: self.send() if state is State.RESTARTING else None)

    async def keep(self) -> None:
        """Report every 0.5 s until cancelled, and measure the delay of the event loop."""
        while True:
            for _ in range(round(INTERVAL_S / _LAG_INTERVAL_S)):
                due_s = time.monotonic() + _LAG_INTERVAL_S
                await asyncio.sleep(_LAG_INTERVAL_S)
                self._counts.observe(LOOP_LAG_S, max(0.0, time.monotonic() - due_s))
            self.send()

    def send(self) -> None:
        """Report the changes; if there are very many, the next report has the rest."""
        series, now = self._counts.changed(), (self.life, self._frontend.load)
        if not series and now == self._sent:
            return
        try:
            for first in range(0, max(len(series), 1), _SERIES_A_MESSAGE)[:_MESSAGES_A_REPORT]:
                part = series[first : first + _SERIES_A_MESSAGE]
                self._control.send(Counted(*now, part))
                self._counts.acknowledge(part)
        except (OSError, BufferError):
            # The supervisor is gone or reads nothing; the next report repeats these changes.
            return
        self._sent = now


class NoReport:
    """Null object: there are no metrics."""

    life = 0

    async def keep(self) -> None:
        """Do nothing."""

    def send(self) -> None:
        """Do nothing."""


def counts_report(control: ControlChannel, frontend: Frontend, counts: Counts | None) -> CountsReport | NoReport:
    return NoReport() if counts is None else CountsReport(control, frontend, counts)
