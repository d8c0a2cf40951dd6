"""Turns of the event loop, shared by the streams that have something to write.

grpc.aio takes one new call in about five turns of the loop. Were every stream with news to write in the same turn, 200
of them would make a turn of 5 ms, and 40 new calls a second would be all. So a turn belongs to a few streams; the
others stand in line and gather meanwhile, which makes their messages fewer and larger.
"""

from __future__ import annotations

import asyncio
from collections import deque

#: Messages in a turn of the loop, about 0.1 ms of it.
MESSAGES_A_TURN = 4


class Turns:
    """Gives streams their places in turns, in the order in which they ask. All calls belong to one event loop."""

    def __init__(self, messages_a_turn: int = MESSAGES_A_TURN) -> None:
        self._limit = messages_a_turn
        self._num_taken = 0
        self._line: deque[asyncio.Future[None]] = deque()

    def take(self) -> bool:
        """Take a place in this turn. False where it is full."""
        if self._num_taken >= self._limit:
            return False
        if not self._num_taken:
            asyncio.get_running_loop().call_soon(self._next)
        self._num_taken += 1
        return True

    def settle(self, waiter: asyncio.Future[None]) -> None:
        """Set the result of `waiter` when it has a place. One that is cancelled meanwhile takes none."""
        if self.take():
            _settle(waiter)
        else:
            self._line.append(waiter)

    def _next(self) -> None:
        """The turn that follows: those in line first."""
        self._num_taken = 0
        while self._line and (self._line[0].done() or self.take()):
            _settle(self._line.popleft())


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
