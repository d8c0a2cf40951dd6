"""The engine's Load, told to all: on change, at most every so often, and the last state always."""

from __future__ import annotations

from photon_grpc.core.ports import Outbox
from photon_grpc.core.stats import Load
from photon_grpc.engine.engine_stats import EngineStats
from photon_grpc.engine.scheduler.scheduler import Scheduler


class LoadBroadcaster:
    """Frames of tokens tell the Load to those who get them; this reaches every front end, also when nothing is sent or
    running.

    Args:
        interval_s: between two broadcasts. What changes within is told at its end: `due_s` bounds how long the engine
            may sleep.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, outbox: Outbox, interval_s: float) -> None:
        self._stats = stats
        self._scheduler = scheduler
        self._outbox = outbox
        self._interval_s = interval_s
        self._told: Load | None = None
        self._may_have_changed = True
        self._next_s = float("-inf")

    def changed(self) -> None:
        """Something happened that the Load may show."""
        self._may_have_changed = True

    def due_s(self) -> float | None:
        """Return the time of the next broadcast; None: nothing has happened since the last one."""
        return self._next_s if self._may_have_changed else None

    def tell(self, now_s: float) -> None:
        """Broadcast what is due."""
        if not self._may_have_changed or now_s < self._next_s:
            return
        self._may_have_changed = False
        load = self._stats.load(self._scheduler)
        if load != self._told:
            self._told, self._next_s = load, now_s + self._interval_s
            self._outbox.broadcast(load)
