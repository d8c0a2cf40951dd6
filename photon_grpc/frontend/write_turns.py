"""Turns of the event loop, shared by the streams that have something to write.

grpc.aio takes one new call in about five turns of the loop. Were every stream with news to write in the same turn,
200 of them would make a turn of 5 ms, and 40 new calls a second would be all. So a turn belongs to a few streams; the
others stand in line and gather meanwhile, which makes their messages fewer and larger. After a turn that took long,
because of a large frame for example, more of them have the next: streams get a share of the loop's time, whatever else
it does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

#: Messages in a turn of the loop, about 0.1 ms of it.
MESSAGES_A_TURN = 4
#: One more in the next turn for each that this one took: ten times what a message takes.
SECONDS_A_MESSAGE = 200e-6
#: At most so many more.
MOST_MORE = 100


class WriteTurns:
    """Gives the streams of a front end their places in turns, in the order in which they ask. All calls belong to one
    event loop."""

    def __init__(self, messages_a_turn: int = MESSAGES_A_TURN, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limit = self._num_free = messages_a_turn
        self._clock = clock
        #: Some of this turn's places are taken.
        self._is_taken = False
        self._began_s = 0.0
        self._line: deque[asyncio.Future[None]] = deque()

    def take(self) -> bool:
        """Take a place in this turn. False where it is full."""
        if not self._num_free:
            return False
        if not self._is_taken:
            self._is_taken = True
            self._began_s = self._clock()
            asyncio.get_running_loop().call_soon(self._next)
        self._num_free -= 1
        return True

    def settle(self, waiter: asyncio.Future[None]) -> None:
        """Set the result of `waiter` when it has a place. One that is cancelled meanwhile takes none."""
        if self.take():
            _settle(waiter)
        else:
            self._line.append(waiter)

    def _next(self) -> None:
        """The turn that follows: those in line first."""
        num_more = min(int((self._clock() - self._began_s) / SECONDS_A_MESSAGE), MOST_MORE)
        self._num_free, self._is_taken = self._limit + num_more, False
        while self._line and (self._line[0].done() or self.take()):
            _settle(self._line.popleft())
        if not self._is_taken:
            self._num_free = self._limit


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
