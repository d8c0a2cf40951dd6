"""Turns for jobs that take long, a few at a time and fairly between callers.

When one caller has a thousand jobs waiting, another caller's job waits only for those that have begun. This is
start-time fair queueing with the size of a job as its cost (`engine/scheduler/fair_queue.py` does the same with
tokens): the caller that was served least is next, and one that returns starts at the current virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import operator
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from photon_grpc.errors import RETRY_AFTER_S, QueueFull

T = TypeVar("T")

#: Every so many turns, a caller's oldest job is next instead of its smallest.
_OLDEST_EVERY = 4
#: The cost of a job beside its bytes: a fork, a change of threads.
_TURN_BYTES = 2**14
#: Callers without a job whose past service is remembered.
_MAX_IDLE = 1024


@dataclass(eq=False, slots=True)
class FairPlace:
    """A job that waits or runs."""

    num_bytes: int
    number: int
    caller: _Caller
    turn: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class _Caller:
    #: Virtual time in bytes.
    served: float
    num_turns: int = 0
    #: A set in order of arrival; thousands may leave at once.
    waiting: dict[FairPlace, None] = field(default_factory=dict)
    #: Jobs that wait or run, and their bytes.
    num_jobs: int = 0
    num_bytes: int = 0

    def count(self, num_jobs: int, num_bytes: int) -> None:
        self.num_jobs += num_jobs
        self.num_bytes += num_bytes

    def next(self, max_bytes: float) -> FairPlace | None:
        """Return the next waiting job of at most `max_bytes`."""
        if self.num_turns % _OLDEST_EVERY == _OLDEST_EVERY - 1:
            return next((place for place in self.waiting if place.num_bytes <= max_bytes), None)
        smallest = min(self.waiting, key=_size)
        return smallest if smallest.num_bytes <= max_bytes else None

    def rank(self) -> tuple[float, int]:
        """Return the sort key of callers: least served first, among equals the one whose job came first."""
        return self.served, next(iter(self.waiting)).number


_size = operator.attrgetter("num_bytes")


class FairTurns:
    """A bounded queue of jobs on one event loop.

    A caller's smallest job comes first, and every fourth time its oldest, so that none starves. If there is no room, a
    new job displaces the newest waiting job of the caller with most, if that caller has more than its own.

    Args:
        num_workers: jobs that run at a time.
        what: what waits, for error messages.
        max_jobs: the most jobs that wait or run.
        max_bytes: the most bytes of these. A single job may have more.
        large_bytes: jobs with more bytes than this run one at a time.
    """

    def __init__(
        self, num_workers: int, what: str, *, max_jobs: int, max_bytes: int, large_bytes: int | None = None
    ) -> None:
        self._num_workers = num_workers
        self._what = what
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._large_bytes = max_bytes if large_bytes is None else large_bytes
        self._numbers = itertools.count()
        self._callers: dict[str, _Caller] = {}
        self._running: list[FairPlace] = []
        #: The sums over all callers.
        self._total = _Caller(0.0)
        #: What the caller served last had been served before that.
        self._virtual_time = 0.0

    def __len__(self) -> int:
        """Return the number of jobs that wait or run."""
        return self._total.num_jobs

    @property
    def num_callers(self) -> int:
        """The number of callers that are remembered."""
        return len(self._callers)

    @contextlib.asynccontextmanager
    async def turn(self, caller: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn that ends with the block. Raise QueueFull."""
        place = await self.enter(caller, num_bytes)
        try:
            yield
        finally:
            self.leave(place)

    async def enter(self, caller: str, num_bytes: int) -> FairPlace:
        """Wait for a turn that `leave` ends. Raise QueueFull."""
        self._make_room(caller, num_bytes)
        future = asyncio.get_running_loop().create_future()
        place = FairPlace(num_bytes, next(self._numbers), self._caller(caller), future)
        place.caller.waiting[place] = None
        self._count(place, 1)
        self._call()
        if not place.turn.done():
            try:
                await place.turn
            except BaseException:
                self.leave(place)
                raise
        return place

    def leave(self, place: FairPlace) -> None:
        if place in self._running:
            self._running.remove(place)
            self._count(place, -1)
        elif place in place.caller.waiting:
            self._remove(place)
        self._call()

    async def perform(self, place: FairPlace, threads: Executor, work: Callable[..., T], *args: Any) -> T:
        """Do the work of a turn in a thread and leave.

        The turn lasts until the thread has finished, even if the call is cancelled, since a thread cannot be ended.
        """
        loop = asyncio.get_running_loop()
        try:
            job = threads.submit(work, *args)
        except BaseException:
            self.leave(place)
            raise

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.leave, place)

        job.add_done_callback(leave)
        return await asyncio.wrap_future(job)

    def _caller(self, name: str) -> _Caller:
        if name not in self._callers:
            if len(self._callers) >= _MAX_IDLE + len(self):
                self._callers = {name: each for name, each in self._callers.items() if each.num_jobs}
            self._callers[name] = _Caller(self._virtual_time)
        caller = self._callers[name]
        if not caller.waiting:
            caller.served = max(caller.served, self._virtual_time)
        return caller

    def _count(self, place: FairPlace, num_jobs: int) -> None:
        """Count a job that came, or with -1 one that left."""
        for each in (place.caller, self._total):
            each.count(num_jobs, num_jobs * place.num_bytes)
        if not len(self):
            # Once nothing waits or runs, past service no longer matters.
            self._callers.clear()
            self._virtual_time = 0.0

    def _remove(self, place: FairPlace) -> None:
        """Forget a waiting job."""
        del place.caller.waiting[place]
        self._count(place, -1)

    def _call(self) -> None:
        while len(self._running) < self._num_workers and (place := self._next()) is not None:
            caller = place.caller
            del caller.waiting[place]
            self._virtual_time = max(self._virtual_time, caller.served)
            caller.served += place.num_bytes + _TURN_BYTES
            caller.num_turns += 1
            self._running.append(place)
            if not place.turn.done():  # it is done if it was cancelled and is about to leave
                place.turn.set_result(None)

    def _next(self) -> FairPlace | None:
        has_large = any(place.num_bytes > self._large_bytes for place in self._running)
        limit = self._large_bytes if has_large else math.inf
        waiting = [caller for caller in self._callers.values() if caller.waiting]
        places = (caller.next(limit) for caller in sorted(waiting, key=_Caller.rank))
        return next((place for place in places if place is not None), None)

    def _make_room(self, caller: str, num_bytes: int) -> None:
        """Displace jobs until there is room for a new one. Raise QueueFull."""
        displaced: list[FairPlace] = []
        while (lack := self._lack(num_bytes, displaced)) is not None:
            place = self._surplus(caller, num_bytes, displaced, lack.is_in_bytes)
            if place is None:
                raise lack.error(self._what)
            displaced.append(place)
        lack = self._lack(num_bytes, [])
        for place in displaced:
            self._remove(place)
            if lack is not None and not place.turn.done():
                place.turn.set_exception(lack.error(self._what))

    def _lack(self, num_bytes: int, displaced: list[FairPlace]) -> _Shortage | None:
        """Return the room that a job of `num_bytes` lacks without the `displaced` jobs, None if it has room."""
        num_jobs = len(self) - len(displaced)
        num_present = self._total.num_bytes - sum([place.num_bytes for place in displaced])
        if num_jobs >= self._max_jobs:
            return _Shortage(num_jobs, num_jobs + 1, self._max_jobs, is_in_bytes=False)
        if num_jobs and num_present + num_bytes > self._max_bytes:
            return _Shortage(num_present, num_present + num_bytes, self._max_bytes, is_in_bytes=True)
        return None

    def _surplus(self, caller: str, num_bytes: int, displaced: list[FairPlace], is_in_bytes: bool) -> FairPlace | None:
        """Return the newest waiting job of the caller with most, not counting the `displaced` ones.

        Return None if that caller would then have less than `caller` gets.
        """

        def size(num_jobs: int, num_bytes: int) -> int:
            return num_bytes if is_in_bytes else num_jobs

        sizes = {each: size(each.num_jobs, each.num_bytes) for each in self._callers.values()}
        for place in displaced:
            sizes[place.caller] -= size(1, place.num_bytes)
        own = size(1, num_bytes) + (sizes.pop(self._callers[caller]) if caller in self._callers else 0)
        if not sizes:
            return None
        most = max(sizes, key=sizes.__getitem__)
        newest = next((place for place in reversed(most.waiting) if place not in displaced), None)
        return newest if newest is not None and sizes[most] - size(1, newest.num_bytes) >= own else None


@dataclass(frozen=True, slots=True)
class _Shortage:
    present: int
    needed: int
    limit: int
    is_in_bytes: bool

    def error(self, what: str) -> QueueFull:
        unit = "bytes of " if self.is_in_bytes else ""
        message = f"{self.present} {unit}{what}; the limit is {self.limit}"
        return QueueFull(message, needed=self.needed, limit=self.limit, retry_after_s=RETRY_AFTER_S)
