"""Places of what is counted (open calls, messages that arrive, bytes that wait), held by owners, so that none of them
can fill a table with silence.

An owner is an API key, or the host of the peer where no key is asked for. In a full table the owner with most places
makes room with the one that has been idle longest. docs/reliability.md names all tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from photon_grpc.errors import RETRY_AFTER_S, IdleStreamEvicted, PhotonError, QueueFull

#: To a stream that is shed, idle or not.
_FOR_MEMORY = "the call was ended because messages that arrive hold too much of the server's memory; open it again"


class Held(Protocol):
    """The holder of a place."""

    def idle_since_s(self) -> float | None:
        """By the monotonic clock. None: it works, and keeps its place."""

    def evict(self, error: PhotonError) -> None:
        """End with `error`: others need the place, which is given away already."""


class _AtWork:
    """Keeps its place to its end."""

    def idle_since_s(self) -> None:
        return None

    def evict(self, error: PhotonError) -> None:
        raise RuntimeError("what works was to make room")


AT_WORK = _AtWork()


class Place:
    """Of one that holds it. A context: the place is free at its end."""

    __slots__ = ("_places", "held", "owner", "size")

    def __init__(self, places: Places, owner: str, held: Held, size: int) -> None:
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

    #: Of what holds a place, for the words of a refusal.
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
        """`what` is counted, as refusals say it. Between equals, and for one's own, a place is taken from what has been
        idle for `least_idle_s`: clients that come back at once would else take turns without end. Without
        `own_make_room` an owner that holds most is refused; without `oldest_first` what came early may have worked
        lately."""
        self.what = what
        self.limit = limit
        self._least_idle_s = least_idle_s
        self._own_make_room = own_make_room
        self._oldest_first = oldest_first
        self._retry_after_s = retry_after_s
        #: Owner -> its places, the oldest first.
        self._places: dict[str, dict[Place, None]] = {}
        #: Owner -> the size of its places together.
        self._sizes: Counter[str] = Counter()
        #: Of all places together.
        self.size = 0

    def take(self, owner: str, held: Held, size: int = 1) -> Place:
        """Return a place; one alone may be of any size. Raise QueueFull where none can make room."""
        for place in self._in_the_way(owner, size):
            self._end(place)
        place = Place(self, owner, held, size)
        self._places.setdefault(owner, {})[place] = None
        self._sizes[owner] += size
        self.size += size
        return place

    def leave(self, place: Place) -> None:
        places = self._places.get(place.owner, {})
        if place not in places:  # given away before
            return
        del places[place]
        self.size -= place.size
        self._sizes[place.owner] -= place.size
        if not places:
            del self._places[place.owner], self._sizes[place.owner]

    def shed(self, *, busy: bool = False) -> bool:
        """End the longest idle place of the owner with most, with `busy` its oldest, idle or not. False: there is
        none."""
        for owner in sorted(self._places, key=self._sizes.__getitem__, reverse=True):
            place = next(iter(self._places[owner])) if busy else self._longest_idle(owner, frozenset(), 0.0)
            if place is not None:
                self._end(place, IdleStreamEvicted(_FOR_MEMORY))
                return True
        return False

    def told(self) -> PhotonError:
        """To what has made room."""
        text = f"the call was idle, and its place is needed: only {self.limit} {self.what} may be open; open it again"
        return IdleStreamEvicted(text, limit=self.limit)

    def _end(self, place: Place, error: PhotonError | None = None) -> None:
        self.leave(place)
        place.held.evict(error or self.told())

    def _full(self, size: int) -> QueueFull:
        text = f"{self.size} {self.what} {self._state}; the limit is {self.limit}"
        return QueueFull(text, needed=self.size + size, limit=self.limit, retry_after_s=self._retry_after_s)

    def _in_the_way(self, owner: str, size: int) -> list[Place]:
        """Those that make room for a new place. Raise QueueFull."""
        found: list[Place] = []
        surplus = self.size + size - self.limit
        if surplus <= 0 or not self.size:
            return found
        sizes = Counter(self._sizes)
        sizes[owner] += size
        while surplus > 0:
            place = self._next_of(sizes, owner, frozenset(found))
            if place is None:
                raise self._full(size)
            found.append(place)
            sizes[place.owner] -= place.size
            surplus -= place.size
        return found

    def _next_of(self, sizes: Counter[str], asking: str, without: frozenset[Place]) -> Place | None:
        """Return the place to end next: of the owner with most, among equals of the asking one, and of no owner that
        holds less than the asking one would."""
        for owner in sorted(sizes, key=lambda each: (-sizes[each], each != asking)):
            if sizes[owner] < sizes[asking]:
                return None
            if owner == asking and not self._own_make_room:
                continue
            is_equal = sizes[owner] == sizes[asking]
            place = self._longest_idle(owner, without, self._least_idle_s if is_equal or owner == asking else 0.0)
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
    """A call that only tells, in a task that reads no message: it is idle from its beginning."""

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
    """Yield a place for the call of the running task. Raise QueueFull, and IdleStreamEvicted out of whatever it
    awaits."""
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
    """Of what has not begun: one that makes room is told to come again."""

    _state = "are held"

    def told(self) -> PhotonError:
        text = f"{self.what}: the limit is {self.limit}, and this caller has the most of them"
        return QueueFull(text, needed=self.limit + 1, limit=self.limit, retry_after_s=self._retry_after_s)


class _Waiter:
    """One that waits for its turn."""

    def __init__(self) -> None:
        self.since_s = time.monotonic()
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def idle_since_s(self) -> float | None:
        return None if self.future.done() else self.since_s

    def evict(self, error: PhotonError) -> None:
        self.future.set_exception(error)


class SharedTurns:
    """So many work at a time; the others wait. Owners take turns, and the connections of each, so that one with endless
    work shuts out only its own; the last turns are left to owners that have none."""

    def __init__(
        self, num_turns: int, waiting: WaitingPlaces, *, num_reserved: int = 0, is_newest_first: bool = False
    ) -> None:
        """`waiting`: places of those that wait, of their sizes."""
        self.num_free = num_turns
        self.waiting = waiting
        self._most_of_one = num_turns - num_reserved
        self._is_newest_first = is_newest_first
        #: Owner -> turns that it has.
        self.held: Counter[str] = Counter()
        #: Owner -> connection -> those that wait, the oldest first. The first of each is the next one served.
        self._queue: dict[str, dict[str, list[_Waiter]]] = {}
        #: No more than one works at a time.
        self.is_scarce = False

    def num_waiting(self, owner: str) -> int:
        return sum(map(len, self._queue.get(owner, {}).values()))

    def owners_waiting(self) -> tuple[str, ...]:
        return tuple(self._queue)

    async def take(self, owner: str, size: int = 1, connection: str = "") -> None:
        """Wait for a turn. Raise QueueFull."""
        if self._may_work(owner):
            self._begin(owner)
            return
        turn = _Waiter()
        with self.waiting.take(owner, turn, size):
            self._queue.setdefault(owner, {}).setdefault(connection, []).append(turn)
            try:
                await turn.future
            except BaseException:
                if turn.future.cancelled() or turn.future.exception() is not None:
                    self._forget(owner, connection, turn)
                else:
                    self.give_back(owner)
                raise

    def give_back(self, owner: str) -> None:
        self.num_free += 1
        self.held[owner] -= 1
        if not self.held[owner]:
            del self.held[owner]
        self.call()

    def call(self) -> None:
        """Those whose turn it is."""
        while (owner := next(filter(self._may_work, self._queue), None)) is not None:
            turn = self._next_of(owner)
            if not turn.future.done():  # cancelled or refused a moment ago, it is about to leave
                self._begin(owner)
                turn.future.set_result(None)

    def _next_of(self, owner: str) -> _Waiter:
        """Return the next waiter. The rest of its connection, and of the owner, stands behind all others then."""
        connections = self._queue.pop(owner)
        connection = next(iter(connections))
        turns = connections.pop(connection)
        turn = turns.pop(-1 if self._is_newest_first else 0)
        if turns:
            connections[connection] = turns
        if connections:
            self._queue[owner] = connections
        return turn

    def _may_work(self, owner: str) -> bool:
        if not self.num_free or (self.is_scarce and self.held):
            return False
        return self.held[owner] < self._most_of_one

    def _begin(self, owner: str) -> None:
        self.num_free -= 1
        self.held[owner] += 1

    def _forget(self, owner: str, connection: str, turn: _Waiter) -> None:
        connections = self._queue.get(owner, {})
        turns = connections.get(connection, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            connections.pop(connection, None)
        if not connections:
            self._queue.pop(owner, None)
