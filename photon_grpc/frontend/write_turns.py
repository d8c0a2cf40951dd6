"""Turns of the event loop, shared by the streams that have something to write.

grpc.aio accepts one new call in about five turns of the loop. If all streams with news wrote in the same turn, 200 of
them would make a turn of 5 ms and limit the server to 40 new calls a second. So only a few streams write in a turn; the
others wait and gather, which makes their messages fewer and larger. After a turn that took long, for example because of
a large frame, more streams write in the next one, so that they keep their share of the loop's time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

#: Messages in a turn of the loop; they take about 0.1 ms.
MESSAGES_A_TURN = 4
#: The next turn has one more message for each such part of this turn's duration: ten times what a message takes.
SECONDS_A_MESSAGE = 200e-6
#: The most additional messages in a turn.
MOST_MORE = 100


class WriteTurns:
    """Gives the streams of one event loop places in its turns, first come, first served."""

    def __init__(self, messages_a_turn: int = MESSAGES_A_TURN, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limit = self._num_free = messages_a_turn
        self._clock = clock
        #: Whether places of this turn are taken.
        self._is_taken = False
        self._began_s = 0.0
        self._line: deque[asyncio.Future[None]] = deque()

    def take(self) -> bool:
        """Take a place in this turn; return whether there was one."""
        if not self._num_free:
            return False
        if not self._is_taken:
            self._is_taken = True
            self._began_s = self._clock()
            asyncio.get_running_loop().call_soon(self._next)
        self._num_free -= 1
        return True

    def settle(self, waiter: asyncio.Future[None]) -> None:
        """Set the result of `waiter` when it has a place. A cancelled one takes no place."""
        if self.take():
            _settle(waiter)
        else:
            self._line.append(waiter)

    def _next(self) -> None:
        """Begin the next turn with those that wait in line."""
        num_more = min(int((self._clock() - self._began_s) / SECONDS_A_MESSAGE), MOST_MORE)
        self._num_free, self._is_taken = self._limit + num_more, False
        while self._line and (self._line[0].done() or self.take()):
            _settle(self._line.popleft())
        if not self._is_taken:
            self._num_free = self._limit


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
