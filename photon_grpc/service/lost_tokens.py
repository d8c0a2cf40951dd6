"""Tokens and requests that front ends took with them: a front end that is killed tells no more what it was sent.

The engine says what it counted for each front end, front ends say what they have accounted for: billed, or dropped as
late. By the difference of a dead one, the engine's counters still equal the sums of all that is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from photon_grpc.bridge.control import FrontendLost

#: Connections that are remembered in one life of the engine; of more, the oldest that are closed are forgotten.
_MAX_CONNECTIONS = 1024


class Tokens(NamedTuple):
    prompt: int = 0
    output: int = 0

    def plus(self, prompt: int, output: int) -> Tokens:
        return Tokens(self.prompt + prompt, self.output + output)

    def beyond(self, other: Tokens) -> Tokens:
        """The excess of this over the other, 0 at least."""
        return Tokens(max(self.prompt - other.prompt, 0), max(self.output - other.output, 0))


class _Process:
    """One front end's process, during one life of the engine."""

    def __init__(self) -> None:
        #: Accounted for before this life.
        self.before = Tokens()
        #: At its end; None: it lives.
        self.accounted: Tokens | None = None
        #: Connections to the engine that this has not given account of.
        self.open: set[int] = set()
        self.sent = Tokens()
        #: Alive in the engine when it was lost.
        self.num_requests = 0
        #: Part of the sum already.
        self.lost = Tokens()


class LostTokens:
    """By the places of front ends, and the numbers that their connections have in the present engine."""

    def __init__(self) -> None:
        self.tokens = Tokens()
        self.num_requests = 0
        self._alive: dict[int, _Process] = {}
        self._by_connection: dict[int, _Process] = {}

    def joined(self, place: int, connection: int) -> None:
        process = self._alive.setdefault(place, _Process())
        process.open.add(connection)
        # It lives, and knows itself how they ended.
        process.num_requests = 0
        self._by_connection[connection] = process
        if len(self._by_connection) > _MAX_CONNECTIONS:
            self._forget_oldest()

    def told(self, lost: FrontendLost) -> None:
        """The engine's account of a connection; the first one closes it."""
        process = self._by_connection.get(lost.frontend)
        if process is None:
            return
        process.open.discard(lost.frontend)
        process.sent = process.sent.plus(lost.prompt_tokens, lost.output_tokens)
        process.num_requests += lost.num_requests
        self._settle(process)

    def ended(self, place: int, accounted: Tokens) -> None:
        """The front end's process, which had accounted for so much since it began."""
        process = self._alive.pop(place, None)
        if process is not None:
            process.accounted = accounted.beyond(process.before)
            self._settle(process)

    def engine_ended(self) -> None:
        """Its counts for each front end are gone with it; front ends give account of all that had come."""
        self._by_connection.clear()
        self._alive.clear()

    def engine_is_ready(self, accounted: Callable[[int], Tokens]) -> None:
        """Front ends, by their places, have accounted for what the engines before this one had sent."""
        for place, process in self._alive.items():
            process.before = accounted(place)

    def _forget_oldest(self) -> None:
        """Of those that the engine has given account of."""
        for number, process in self._by_connection.items():
            if number not in process.open:
                del self._by_connection[number]
                return

    def _settle(self, process: _Process) -> None:
        if process.accounted is None or process.open:
            return
        lost = process.sent.beyond(process.accounted)
        self.tokens = self.tokens.plus(*lost.beyond(process.lost))
        process.lost = lost
        self.num_requests += process.num_requests
        process.num_requests = 0
