"""Broadcasts the engine's Load on change, at a limited rate, and always the last state."""

from __future__ import annotations

from photon_grpc.core.ports import Outbox
from photon_grpc.core.stats import Load
from photon_grpc.engine.engine_stats import EngineStats
from photon_grpc.engine.scheduler.scheduler import Scheduler


class LoadBroadcaster:
    """Sends the Load to every front end, including those that get no StepFrame with it.

    Args:
        interval_s: shortest time between two broadcasts. Changes within it are sent at its end: `due_s` bounds how long
            the engine may sleep.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, outbox: Outbox, interval_s: float) -> None:
        self._stats = stats
        self._scheduler = scheduler
        self._outbox = outbox
        self._interval_s = interval_s
        self._sent: Load | None = None
        self._may_have_changed = True
        self._next_s = float("-inf")

    def changed(self) -> None:
        """Note that the Load may have changed."""
        self._may_have_changed = True

    def due_s(self) -> float | None:
        """Return the time of the next broadcast; None if nothing has changed since the last one."""
        return self._next_s if self._may_have_changed else None

    def send(self, now_s: float) -> None:
        """Broadcast the Load if it has changed and a broadcast is due."""
        if not self._may_have_changed or now_s < self._next_s:
            return
        self._may_have_changed = False
        load = self._stats.load(self._scheduler)
        if load != self._sent:
            self._sent, self._next_s = load, now_s + self._interval_s
            self._outbox.broadcast(load)
