"""Who is next, who may be admitted now, who gives way. One object per `--scheduling-policy`."""

from __future__ import annotations

from typing import Protocol

from photon_grpc.core.request import Request

#: Waiting this long counts as much as one step of priority, so nobody starves.
AGEING_S = 30.0


class Policy(Protocol):
    @property
    def obeys_priority(self) -> bool:
        """Whether `Request.priority` matters; where it does not, front ends refuse it."""

    def rank(self, request: Request) -> float:
        """Smaller runs first; the largest gives way when memory is short. Arrival decides among equals."""

    def open(self, num_running: int, num_waiting: int) -> int:
        """How many may be admitted in the step being planned."""

    def admitted(self) -> None:
        """One was."""


class Fcfs:
    """First come, first served."""

    obeys_priority = False

    def rank(self, request: Request) -> float:
        return request.arrival_s

    def open(self, num_running: int, num_waiting: int) -> int:
        return num_waiting

    def admitted(self) -> None:
        pass


class Priority(Fcfs):
    """Higher priority first, first come among equals; waiting raises it slowly.

    The key does not change while a request waits: ageing at the same rate for all leaves the order of two requests as it was at the
    arrival of the later one.
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
    """A batch is admitted when the one before is done: whoever waits at that moment makes up the next one."""

    def __init__(self) -> None:
        self._seats = 0

    def open(self, num_running: int, num_waiting: int) -> int:
        if num_running == 0:
            self._seats = num_waiting
        return self._seats

    def admitted(self) -> None:
        self._seats -= 1


POLICIES: dict[str, type[Fcfs]] = {"fcfs": Fcfs, "priority": Priority, "deadline": Deadline, "static": Static}
