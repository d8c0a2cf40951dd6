"""Constraints that were tried out well, so that each is tried once."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from functools import partial

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.constraint import Constraint
from photon_grpc.frontend.encoder import Encoder
from photon_grpc.frontend.shared_cache import SharedCache

_MAX_BYTES = 2**23
#: Of what holds the texts of one: the ask, the grammar, and their place.
_ENTRY_BYTES = 512


class TriedConstraints:
    """Asks the encoder about what is new; belongs to one event loop. A trial is shared within an API key, and among all
    where there are no keys; it waits in the turn of the caller that began it.

    Args:
        encoder: tries out.
        max_bytes: of the constraints and grammars that are kept.
    """

    def __init__(self, encoder: Encoder, max_bytes: int = _MAX_BYTES) -> None:
        self._encoder = encoder
        self._kept: SharedCache[_Key, Constraint] = SharedCache(max_bytes)
        #: By caller, too: none waits in another's turn.
        self._running: dict[tuple[str, _Key], _Trial] = {}

    async def tried(self, ask: ConstraintAsk, owner: str = "", caller: str = "") -> Constraint:
        """Return the grammar of a checked `ask`. A trial goes on when one of those that wait for it is gone, and ends
        with the last. Raises InvalidConstraint, Overloaded, EngineRestarting."""
        key = (owner, ask)
        kept = self._kept.find(caller, key)
        if kept is not None:
            return kept
        trial = self._running.get((caller, key)) or self._begin(caller, key)
        trial.num_waiting += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting and not trial.task.done():
                self._running.pop((caller, key), None)
                trial.task.cancel()

    def _begin(self, caller: str, key: _Key) -> _Trial:
        trial = _Trial(asyncio.create_task(self._encoder.try_out(key[1], caller)))
        self._running[caller, key] = trial
        trial.task.add_done_callback(partial(self._done, caller, key))
        return trial

    def _done(self, caller: str, key: _Key, task: asyncio.Task[Constraint]) -> None:
        running = self._running.get((caller, key))
        if running is not None and running.task is task:
            del self._running[caller, key]
        if not task.cancelled() and task.exception() is None:
            self._kept.keep(caller, key, task.result(), _num_bytes(key[1], task.result()))


@dataclass(slots=True)
class _Trial:
    task: asyncio.Task[Constraint]
    num_waiting: int = 0


#: API key, what was tried.
_Key = tuple[str, ConstraintAsk]


def _num_bytes(ask: ConstraintAsk, constraint: Constraint) -> int:
    """As they lie in memory: a choice of one character takes fifty times its length."""
    texts = (ask.text, *ask.choices, constraint.grammar)
    return _ENTRY_BYTES + sum(map(sys.getsizeof, texts)) + sys.getsizeof(ask.choices)
