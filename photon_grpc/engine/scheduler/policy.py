"""Ranks requests: the next to be admitted, the first to give way. One object per `--scheduling-policy`."""

from __future__ import annotations

from typing import Protocol

from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Rank
from photon_grpc.engine.scheduler.fair_queue import FairQueue
from photon_grpc.engine.scheduler.queue import RankedQueue, WaitingQueue

#: Waiting this long counts as much as one step of priority, so no request starves.
AGEING_S = 30.0


class Policy(Protocol):
    @property
    def obeys_priority(self) -> bool:
        """False where `Request.priority` means nothing; front ends refuse it then."""

    def queue(self) -> WaitingQueue:
        """Return a new one, empty."""

    def rank(self, request: Request) -> float:
        """Smaller runs first; the largest gives way when memory is short. Arrival decides among equals."""

    def admits(self, rank: Rank, newest: Rank, num_running: int) -> bool:
        """Return whether the first of those that wait may be seated in the step being planned, if there is room.

        Args:
            rank: its own.
            newest: of all that ever came, the last.
            num_running: sequences that have a seat.
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
    """Higher priority first, first come among equals; waiting raises it slowly.

    The key does not change while a request waits: ageing at the same rate for all leaves the order of two requests as
    it was at the arrival of the later one.
    """

    obeys_priority = True

    def rank(self, request: Request) -> float:
        return request.arrival_s - AGEING_S * request.priority


class Deadline(Fcfs):
    """Earliest deadline first; those without one come last, by arrival."""

    def rank(self, request: Request) -> float:
        # Monotonic clocks stay far below this, so requests without a deadline keep their order behind all others.
        return request.deadline_s if request.deadline_s is not None else 1e12 + request.arrival_s


class Static(Fcfs):
    """A batch is admitted when the one before is done: all that wait at that moment make up the next one, all outputs
    of a request included. They take seats as these come free; one that is preempted stays in its batch."""

    def __init__(self) -> None:
        self._last: Rank = (0.0, -1)

    def rank(self, request: Request) -> float:
        # By arrival at the engine alone: a latecomer never stands before one of the batch.
        return 0.0

    def admits(self, rank: Rank, newest: Rank, num_running: int) -> bool:
        if rank > self._last and not num_running:
            self._last = newest
        return rank <= self._last


POLICIES: dict[str, type[Fcfs]] = {"fcfs": Fcfs, "priority": Priority, "deadline": Deadline, "static": Static}


class FairShare:
    """Another policy, within owners: between them, the one that has had least is next."""

    def __init__(self, within: Policy) -> None:
        self._within = within
        self.obeys_priority = within.obeys_priority
        self.rank = within.rank
        self.admits = within.admits

    def queue(self) -> WaitingQueue:
        return FairQueue()
