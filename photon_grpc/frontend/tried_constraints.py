"""Constraints that were tried out well, so that each is tried once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial

from photon_grpc.core.constraint import Constraint
from photon_grpc.frontend.ask import ConstraintAsk
from photon_grpc.frontend.encoder import Encoder

_MAX_CHARS = 2**25


class TriedConstraints:
    """Asks the encoder about what is new; belongs to one event loop.

    Args:
        encoder: tries out.
        max_chars: of the constraints and grammars that are kept.
    """

    def __init__(self, encoder: Encoder, max_chars: int = _MAX_CHARS) -> None:
        self._encoder = encoder
        self._max_chars = max_chars
        self._num_chars = 0
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
        self._num_chars += _num_chars(ask, task.result())
        while self._num_chars > self._max_chars:
            self._num_chars -= _num_chars(*self._kept.popitem(last=False))


def _num_chars(ask: ConstraintAsk, constraint: Constraint) -> int:
    return len(ask.text) + sum(map(len, ask.choices)) + len(constraint.grammar)
