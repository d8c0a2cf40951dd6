"""Limited places (for open calls, arriving messages, waiting bytes), counted by owner.

An owner is an API key or, without keys, the peer's host. When a table is full, the owner with the most places gives up
the one that has been idle longest, so no owner can fill a table with idle calls. docs/reliability.md lists the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from photon_grpc.errors import RETRY_AFTER_S, IdleStreamEvicted, PhotonError, QueueFull

#: The error text of a stream that is shed, idle or not.
_FOR_MEMORY = "the call was ended because incoming messages use too much of the server's memory; open it again"


class PlaceHolder(Protocol):
    """The holder of a place."""

    def idle_since_s(self) -> float | None:
        """Return the monotonic time since which it has been idle; None while it works and keeps its place."""

    def evict(self, error: PhotonError) -> None:
        """End with `error`. The place already belongs to another holder."""


class _NeverIdle:
    """A holder that is never idle, and so keeps its place to its end."""

    def idle_since_s(self) -> None:
        return None

    def evict(self, error: PhotonError) -> None:
        raise RuntimeError("a holder at work was evicted")


AT_WORK = _NeverIdle()


class Place:
    """A place and its holder. As a context manager it frees the place on exit."""

    __slots__ = ("_places", "held", "owner", "size")

    def __init__(self, places: Places, owner: str, held: PlaceHolder, size: int) -> None:
        self._places = places
        self.owner = owner
        self.held = held
        self.size = size

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self._places.leave(self)


class Places:
    """One table. Belongs to one event loop."""

    #: What holders do, for the text of a refusal.
    _state = "are open"

    def __init__(
        self,
        what: str,
        limit: int,
        *,
        least_idle_s: float = 0.0,
        own_make_room: bool = True,
        oldest_first: bool = True,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        """Create an empty table.

        Args:
            what: name of what is counted, for refusals.
            limit: sum of the sizes of all places.
            least_idle_s: idle time before an owner's own place, or one of an owner with as many, is taken. Without it,
                clients that reconnect at once would evict each other endlessly.
            own_make_room: take places from the owner that asks; if False, an owner with the most places is refused.
            oldest_first: the oldest place has been idle longest; if False, all of an owner's places are compared.
            retry_after_s: for refusals.
        """
        self.what = what
        self.limit = limit
        self._least_idle_s = least_idle_s
        self._own_make_room = own_make_room
        self._oldest_first = oldest_first
        self._retry_after_s = retry_after_s
        #: Owner -> its places, the oldest first.
        self._places: dict[str, dict[Place, None]] = {}
        #: Owner -> total size of its places.
        self._sizes: Counter[str] = Counter()
        #: Total size of all places.
        self.size = 0

    def take(self, owner: str, held: PlaceHolder, size: int = 1) -> Place:
        """Take a place, which may be of any size if it is the only one. Raise QueueFull if no place can be freed."""
        for place in self._to_evict(owner, size):
            self._end(place)
        place = Place(self, owner, held, size)
        self._places.setdefault(owner, {})[place] = None
        self._sizes[owner] += size
        self.size += size
        return place

    def leave(self, place: Place) -> None:
        places = self._places.get(place.owner, {})
        if place not in places:  # already evicted
            return
        del places[place]
        self.size -= place.size
        self._sizes[place.owner] -= place.size
        if not places:
            del self._places[place.owner], self._sizes[place.owner]

    def shed(self, *, busy: bool = False) -> bool:
        """Evict the longest idle place of the owner with most; with `busy` its oldest. Return whether there was one."""
        for owner in sorted(self._places, key=self._sizes.__getitem__, reverse=True):
            place = next(iter(self._places[owner])) if busy else self._longest_idle(owner, frozenset(), 0.0)
            if place is not None:
                self._end(place, IdleStreamEvicted(_FOR_MEMORY))
                return True
        return False

    def eviction_error(self) -> PhotonError:
        """Return the error for an evicted holder."""
        text = f"the idle call made room for another: at most {self.limit} {self.what} may be open; open it again"
        return IdleStreamEvicted(text, limit=self.limit)

    def _end(self, place: Place, error: PhotonError | None = None) -> None:
        self.leave(place)
        place.held.evict(error or self.eviction_error())

    def _full(self, size: int) -> QueueFull:
        text = f"{self.size} {self.what} {self._state}; the limit is {self.limit}"
        return QueueFull(text, needed=self.size + size, limit=self.limit, retry_after_s=self._retry_after_s)

    def _to_evict(self, owner: str, size: int) -> list[Place]:
        """Return the places to evict for a new one. Raise QueueFull."""
        found: list[Place] = []
        surplus = self.size + size - self.limit
        if surplus <= 0 or not self.size:
            return found
        sizes = Counter(self._sizes)
        sizes[owner] += size
        while surplus > 0:
            place = self._next_to_evict(sizes, owner, frozenset(found))
            if place is None:
                raise self._full(size)
            found.append(place)
            sizes[place.owner] -= place.size
            surplus -= place.size
        return found

    def _next_to_evict(self, sizes: Counter[str], newcomer: str, without: frozenset[Place]) -> Place | None:
        """Return the next place to evict.

        It belongs to the owner with the most, of equals first to `newcomer`, and never to an owner that holds less than
        `newcomer` would.
        """
        for owner in sorted(sizes, key=lambda each: (-sizes[each], each != newcomer)):
            if sizes[owner] < sizes[newcomer]:
                return None
            if owner == newcomer and not self._own_make_room:
                continue
            is_equal = sizes[owner] == sizes[newcomer]
            place = self._longest_idle(owner, without, self._least_idle_s if is_equal or owner == newcomer else 0.0)
            if place is not None:
                return place
        return None

    def _longest_idle(self, owner: str, without: frozenset[Place], least_s: float) -> Place | None:
        before_s = time.monotonic() - least_s
        longest, longest_since_s = None, before_s
        for place in self._places.get(owner, ()):
            since_s = None if place in without else place.held.idle_since_s()
            if since_s is not None and since_s <= before_s and (longest is None or since_s < longest_since_s):
                longest, longest_since_s = place, since_s
            if since_s is not None and self._oldest_first:
                break
        return longest


class _SilentCall:
    """A call that only sends, in a task that reads no message. It counts as idle from its start."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._task = asyncio.current_task()
        self.error: PhotonError | None = None

    def idle_since_s(self) -> float:
        return self._since_s

    def evict(self, error: PhotonError) -> None:
        self.error = error
        if self._task is not None:
            self._task.cancel()


@contextlib.contextmanager
def silent_call(places: Places, owner: str) -> Iterator[None]:
    """Hold a place for the running task's call. Raise QueueFull, or IdleStreamEvicted from whatever the task awaits."""
    call = _SilentCall()
    with places.take(owner, call):
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call.error is None or task is None or task.uncancel():
                raise
            raise call.error from None


class WaitingPlaces(Places):
    """A table of holders that have not started; an evicted one gets QueueFull and should retry."""

    _state = "are held"

    def eviction_error(self) -> PhotonError:
        """Return the error for an evicted holder."""
        text = f"{self.what}: the limit is {self.limit}, and this caller has the most of them"
        return QueueFull(text, needed=self.limit + 1, limit=self.limit, retry_after_s=self._retry_after_s)


class _Waiter:
    """A task that waits for its turn."""

    def __init__(self) -> None:
        self.since_s = time.monotonic()
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def idle_since_s(self) -> float | None:
        return None if self.future.done() else self.since_s

    def evict(self, error: PhotonError) -> None:
        self.future.set_exception(error)


class SharedTurns:
    """A semaphore that is fair between owners, and between the connections of each.

    An owner with endless work delays only its own, since one owner may never hold the reserved turns.
    """

    def __init__(
        self, num_turns: int, waiting: WaitingPlaces, *, num_reserved: int = 0, is_newest_first: bool = False
    ) -> None:
        """Create `num_turns` free turns, of which one owner may hold all but `num_reserved`.

        `waiting` has the places of the waiters. With `is_newest_first` a connection's newest waiter is served first.
        """
        self.num_free = num_turns
        self.waiting = waiting
        self._most_of_one = num_turns - num_reserved
        self._is_newest_first = is_newest_first
        #: Owner -> the number of turns it holds.
        self.held: Counter[str] = Counter()
        #: Owner -> connection -> its waiters, oldest first. The first owner and its first connection are served next.
        self._queue: dict[str, dict[str, list[_Waiter]]] = {}
        #: If True, only one turn is held at a time.
        self.is_scarce = False

    def num_waiting(self, owner: str) -> int:
        return sum(map(len, self._queue.get(owner, {}).values()))

    def owners_waiting(self) -> tuple[str, ...]:
        return tuple(self._queue)

    async def take(self, owner: str, size: int = 1, connection: str = "") -> None:
        """Wait for a turn. Raise QueueFull."""
        if self._may_start(owner):
            self._start(owner)
            return
        waiter = _Waiter()
        with self.waiting.take(owner, waiter, size):
            self._queue.setdefault(owner, {}).setdefault(connection, []).append(waiter)
            try:
                await waiter.future
            except BaseException:
                if waiter.future.cancelled() or waiter.future.exception() is not None:
                    self._forget(owner, connection, waiter)
                else:
                    self.give_back(owner)
                raise

    def give_back(self, owner: str) -> None:
        self.num_free += 1
        self.held[owner] -= 1
        if not self.held[owner]:
            del self.held[owner]
        self.wake()

    def wake(self) -> None:
        """Give the free turns to waiters."""
        while (owner := next(filter(self._may_start, self._queue), None)) is not None:
            waiter = self._pop_waiter(owner)
            if not waiter.future.done():  # else it was cancelled or refused, and is about to leave
                self._start(owner)
                waiter.future.set_result(None)

    def _pop_waiter(self, owner: str) -> _Waiter:
        """Remove and return the owner's next waiter. Its connection and the owner move to the end of their queues."""
        connections = self._queue.pop(owner)
        connection = next(iter(connections))
        waiters = connections.pop(connection)
        waiter = waiters.pop(-1 if self._is_newest_first else 0)
        if waiters:
            connections[connection] = waiters
        if connections:
            self._queue[owner] = connections
        return waiter

    def _may_start(self, owner: str) -> bool:
        if not self.num_free or (self.is_scarce and self.held):
            return False
        return self.held[owner] < self._most_of_one

    def _start(self, owner: str) -> None:
        self.num_free -= 1
        self.held[owner] += 1

    def _forget(self, owner: str, connection: str, waiter: _Waiter) -> None:
        connections = self._queue.get(owner, {})
        waiters = connections.get(connection, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            connections.pop(connection, None)
        if not connections:
            self._queue.pop(owner, None)
