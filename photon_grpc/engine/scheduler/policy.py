"""Ranks requests for admission and preemption. One class per `--scheduling-policy`."""

from __future__ import annotations

from typing import Protocol

from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Rank
from photon_grpc.engine.scheduler.fair_queue import FairQueue
from photon_grpc.engine.scheduler.queue import RankedQueue, WaitingQueue

#: Waiting this long counts as much as one level of priority, so no request starves.
AGEING_S = 30.0


class Policy(Protocol):
    @property
    def obeys_priority(self) -> bool:
        """Whether `Request.priority` has a meaning; otherwise front ends refuse it."""

    def queue(self) -> WaitingQueue:
        """Return a new, empty queue."""

    def rank(self, request: Request) -> float:
        """Return the rank: smaller runs first, the largest is preempted first. Arrival decides among equals."""

    def admits(self, rank: Rank, newest: Rank, num_running: int) -> bool:
        """Return whether the first waiting sequence may be admitted to the step being planned, if there is room.

        Args:
            rank: its rank.
            newest: rank of the sequence that arrived last.
            num_running: sequences with a slot.
        """


class Fcfs:
    """First come, first served."""

    obeys_priority = False

    def queue(self) -> WaitingQueue:
        return RankedQueue()

    def rank(self, request: Request) -> float:
        return request.arrival_s

    def admits(self, rank: Rank, newest: Rank, num_running: int) -> bool:
        return True


class Priority(Fcfs):
    """Higher priority first, arrival order among equals; waiting raises the priority slowly.

    The key does not change while a request waits: all age at the same rate, so the order of two requests is fixed when
    the later one arrives.
    """

    obeys_priority = True

    def rank(self, request: Request) -> float:
        return request.arrival_s - AGEING_S * request.priority


class Deadline(Fcfs):
    """Earliest deadline first; requests without one come last, by arrival."""

    def rank(self, request: Request) -> float:
        # Monotonic clocks stay far below 1e12, so requests without a deadline come after all others.
        return request.deadline_s if request.deadline_s is not None else 1e12 + request.arrival_s


class Static(Fcfs):
    """Admits a batch when the previous one is done: all that wait at that moment, with all outputs of a request.

    Its sequences get slots as these become free. A preempted sequence stays in its batch.
    """

    def __init__(self) -> None:
        self._last: Rank = (0.0, -1)

    def rank(self, request: Request) -> float:
        # Only arrival at the engine counts, so a later request never precedes one of the batch.
        return 0.0

    def admits(self, rank: Rank, newest: Rank, num_running: int) -> bool:
        if rank > self._last and not num_running:
            self._last = newest
        return rank <= self._last


POLICIES: dict[str, type[Fcfs]] = {"fcfs": Fcfs, "priority": Priority, "deadline": Deadline, "static": Static}


class FairShare:
    """Applies a policy within each owner; between owners, the one that was served least is next."""

    def __init__(self, within: Policy) -> None:
        self._within = within
        self.obeys_priority = within.obeys_priority
        self.rank = within.rank
        self.admits = within.admits

    def queue(self) -> WaitingQueue:
        return FairQueue()
