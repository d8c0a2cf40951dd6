"""Constraints that were tried out well, so that each is tried once."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from functools import partial

from photon_grpc.core.constraint import Constraint
from photon_grpc.frontend.ask import ConstraintAsk
from photon_grpc.frontend.encoder import Encoder

_MAX_BYTES = 2**23
#: Of what holds the texts of one: the ask, the grammar, and their place.
_ENTRY_BYTES = 512


class TriedConstraints:
    """Asks the encoder about what is new; belongs to one event loop.

    Args:
        encoder: tries out.
        max_bytes: of the constraints and grammars that are kept.
    """

    def __init__(self, encoder: Encoder, max_bytes: int = _MAX_BYTES) -> None:
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        #: Oldest use first.
        self._kept: OrderedDict[ConstraintAsk, Constraint] = OrderedDict()
        self._running: dict[ConstraintAsk, asyncio.Task[Constraint]] = {}

    async def tried(self, ask: ConstraintAsk) -> Constraint:
        """The grammar of a checked `ask`. A trial goes on when one of those that wait for it is gone. Raises
        InvalidConstraint, Overloaded, EngineRestarting."""
        kept = self._kept.get(ask)
        if kept is not None:
            self._kept.move_to_end(ask)
            return kept
        task = self._running.get(ask)
        if task is None:
            task = self._running[ask] = asyncio.create_task(self._encoder.try_out(ask))
            task.add_done_callback(partial(self._done, ask))
        return await asyncio.shield(task)

    def _done(self, ask: ConstraintAsk, task: asyncio.Task[Constraint]) -> None:
        del self._running[ask]
        if task.cancelled() or task.exception() is not None:
            return
        self._kept[ask] = task.result()
        self._num_bytes += _num_bytes(ask, task.result())
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _num_bytes(*self._kept.popitem(last=False))


def _num_bytes(ask: ConstraintAsk, constraint: Constraint) -> int:
    """As they lie in memory: a choice of one character takes fifty times its length."""
    texts = (ask.text, *ask.choices, constraint.grammar)
    return _ENTRY_BYTES + sum(map(sys.getsizeof, texts)) + sys.getsizeof(ask.choices)
