"""Sends pictures of the engine to the front ends that watch it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Columns

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.engine_picture import MAX_STEPS, EnginePicture, StepWork
from photon_grpc.core.frames import Facts
from photon_grpc.core.ports import Outbox
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.engine_stats import EngineStats
from photon_grpc.engine.lanes import Lanes
from photon_grpc.engine.scheduler.scheduler import Scheduler
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder

#: Shortest time between two pictures, and the time between two while nothing changes.
_INTERVAL_S, _REST_S = 0.1, 1.0


class Pictures:
    """The pictures for all watching front ends, as one of the engine's StepTraces.

    While no front end watches, it is not called and holds nothing.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, outbox: Outbox, facts: Facts) -> None:
        self._stats = stats
        self._scheduler = scheduler
        self._outbox = outbox
        self._zero_s = time.monotonic()
        self._num_slots = facts.max_num_seqs
        self._frontends: set[int] = set()
        self._begin(())

    @property
    def is_watched(self) -> bool:
        return bool(self._frontends)

    def watch(self, frontend: int, is_on: bool) -> None:
        """Send pictures to a front end from now on, the first as soon as possible, or no longer."""
        if is_on:
            if not self._frontends:
                self._begin(self._scheduler.live.running)
            self._frontends.add(frontend)
            self._has_changed = True
        else:
            self._frontends.discard(frontend)
            if not self._frontends:
                self._begin(())

    def due_s(self) -> float | None:
        """Return the time of the next picture; None while no front end watches."""
        if not self._frontends:
            return None
        return self._sent_s + (_INTERVAL_S if self._has_changed else _REST_S)

    def launching(self, batch: Batch, rows: Columns[Sequence]) -> None:
        self._lanes.launching(batch, rows)

    def settled(self, output: StepOutput) -> None:
        work = self._lanes.settled(output.step, output.duration_s)
        if work is not None:
            self._steps.append(work)
            self._num_steps += 1
            self._has_changed = True

    def aborted(self, seq: Sequence, by_stop_string: bool) -> None:
        self._has_changed = True

    def turned(self, report: StepFrameBuilder, scheduler: Scheduler) -> None:
        """Send a picture if one is due."""
        if report.columns:
            self._has_changed = True
            names = [(frontend, handle) for frontend, each in report.columns.items() for handle in each.preempted]
            if names:
                self._lanes.preempted(names)
        now_s, due_s = time.monotonic(), self.due_s()
        if due_s is not None and now_s >= due_s:
            self._send(now_s)

    def close(self) -> None:
        self._frontends.clear()

    def _begin(self, running: Columns[Sequence]) -> None:
        self._lanes = Lanes(self._num_slots, running)
        self._steps: deque[StepWork] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._has_changed = False
        self._sent_s = float("-inf")

    def _send(self, now_s: float) -> None:
        load = self._stats.load(self._scheduler)
        time_s = round(now_s - self._zero_s, 3)
        picture = EnginePicture(time_s, tuple(self._steps), self._num_steps, self._lanes.take(), load)
        for frontend in self._frontends:
            self._outbox.send(frontend, picture)
        self._steps.clear()
        self._num_steps = 0
        self._has_changed, self._sent_s = False, now_s
