"""Deadlines and time limits, which fall due in any state of a sequence."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import IntEnum

from photon_grpc.core.sequence import Sequence, Status


class TimerKind(IntEnum):
    DEADLINE = 0
    QUEUE_DEADLINE = 1
    TIME_LIMIT = 2


class Timers:
    """A heap of (time, order, what, sequence).

    Entries of finished sequences are skipped, and removed once they are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TimerKind, Sequence]] = []
        self._order = 0

    def add(self, seq: Sequence) -> None:
        request = seq.request
        for due, at_s in (
            (TimerKind.DEADLINE, request.deadline_s),
            (TimerKind.QUEUE_DEADLINE, request.queue_deadline_s),
            (TimerKind.TIME_LIMIT, request.time_limit_s),
        ):
            if at_s is not None:
                self._order += 1
                heapq.heappush(self._heap, (at_s, self._order, due, seq))

    def next_s(self) -> float | None:
        while self._heap and self._heap[0][3].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> Iterator[tuple[TimerKind, Sequence]]:
        while self._heap and self._heap[0][0] <= now_s:
            _, _, due, seq = heapq.heappop(self._heap)
            if seq.status is not Status.FINISHED:
                yield due, seq

    def sweep(self, num_live: int) -> None:
        """Drop the entries of finished sequences once they are more than half."""
        if len(self._heap) > 6 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[3].status is not Status.FINISHED]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
