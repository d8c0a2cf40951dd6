"""A cache of the constraints that passed their trial, so that each is tried once."""

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
#: Memory of one entry without its texts: the ask, the grammar and their place.
_ENTRY_BYTES = 512


class TriedConstraints:
    """The constraints that passed; new ones are tried by the encoder. Belongs to one event loop.

    The result is shared within an API key, or among all callers if there are no keys. A trial waits in the turn of its
    caller.

    Args:
        encoder: tries new constraints.
        max_bytes: the most memory for constraints and their grammars.
    """

    def __init__(self, encoder: Encoder, max_bytes: int = _MAX_BYTES) -> None:
        self._encoder = encoder
        self._kept: SharedCache[_Key, Constraint] = SharedCache(max_bytes)
        # Keyed by caller, too, so that no caller waits for the turn of another.
        self._running: dict[tuple[str, _Key], _Trial] = {}

    async def tried(self, ask: ConstraintAsk, owner: str = "", caller: str = "") -> Constraint:
        """Return the grammar of a checked `ask`. Raise InvalidConstraint, Overloaded, EngineRestarting.

        A trial is cancelled when the last of those that wait for it is gone.
        """
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


#: The API key and the constraint.
_Key = tuple[str, ConstraintAsk]


def _num_bytes(ask: ConstraintAsk, constraint: Constraint) -> int:
    """Return the bytes in memory; a choice of one character takes fifty times its length."""
    texts = (ask.text, *ask.choices, constraint.grammar)
    return _ENTRY_BYTES + sum(map(sys.getsizeof, texts)) + sys.getsizeof(ask.choices)
