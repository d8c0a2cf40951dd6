"""A front end tells the supervisor what it counts, so that nothing counted goes with it."""

from __future__ import annotations

import asyncio
import time

from photon_grpc.bridge.control import ControlChannel, Counted
from photon_grpc.core.counts import Counts
from photon_grpc.core.stats import Load
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.readiness import State
from photon_grpc.server.observe.metrics import LOOP_LAG_S

#: A front end that is killed takes with it what it has counted meanwhile.
INTERVAL_S = 0.5
#: The event loop is asked so often how late it is: what holds it up for longer is always met.
_LAG_INTERVAL_S = 0.05


class CountsReport:
    """Belongs to the event loop of the front end."""

    def __init__(self, control: ControlChannel, frontend: Frontend, counts: Counts) -> None:
        self._control = control
        self._frontend = frontend
        self._counts = counts
        self._told: tuple[int, Load] | None = None
        #: Of the engine that the front end is joined to.
        self.life = 0
        # Before an engine is forgotten: its last Load.
        frontend.on_state(lambda state: self.tell() if state is State.RESTARTING else None)

    async def keep(self) -> None:
        """For ever: `tell` now and then, and look how late the loop is."""
        while True:
            for _ in range(round(INTERVAL_S / _LAG_INTERVAL_S)):
                due_s = time.monotonic() + _LAG_INTERVAL_S
                await asyncio.sleep(_LAG_INTERVAL_S)
                self._counts.observe(LOOP_LAG_S, max(0.0, time.monotonic() - due_s))
            self.tell()

    def tell(self) -> None:
        """All that is new."""
        series, now = self._counts.changed(), (self.life, self._frontend.load)
        if not series and now == self._told:
            return
        try:
            self._control.send(Counted(*now, series))
        except (OSError, BufferError):
            # It is gone, or reads nothing: the next time, perhaps.
            return
        self._counts.acknowledge()
        self._told = now


class NoReport:
    """Null object: there are no metrics."""

    life = 0

    async def keep(self) -> None:
        """Nothing."""

    def tell(self) -> None:
        """Nothing."""


def counts_report(control: ControlChannel, frontend: Frontend, counts: Counts | None) -> CountsReport | NoReport:
    return NoReport() if counts is None else CountsReport(control, frontend, counts)
