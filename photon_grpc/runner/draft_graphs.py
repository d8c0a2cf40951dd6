"""Replays of what drafters compute: their forwards are short, and many launches take longer than the kernels.

A forward is captured at its first use, which is in the warm-up, for the next larger bucket of rows: surplus rows carry
slot 0 and compute nothing. What is sampled behind it is launched as ever.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from photon_grpc.errors import StartupError
from photon_grpc.runner.graphs import Capture, Tensors
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Rows

_LOG = logging.getLogger(__name__)

#: The rows of replays, fewer than of verify steps, since a pass is short; more rows are launched one by one.
_ROWS = (1, 4, 8, 16, 32, 64)
MAX_ROWS = _ROWS[-1]


class DraftGraphs:
    """The replays of one drafter, and the rows that they compute.

    Args:
        capture: makes replays; None: nothing is captured.
        table: the slots.
    """

    def __init__(self, capture: Capture | None, table: SlotTable) -> None:
        self._capture = capture
        self._table = table
        self._columns = torch.zeros((2, MAX_ROWS), dtype=torch.int64, device=table.device)
        self._context_len = torch.zeros(MAX_ROWS, dtype=torch.int32, device=table.device)
        #: Int64 []: the tokens between what is known of a row and what is computed.
        self.behind = torch.zeros((), dtype=torch.int64, device=table.device)
        #: The size and slots of the rows that are there; None if that is unknown.
        self._sent: tuple[int, tuple[int, ...]] | None = None
        self._replays: dict[tuple[Hashable, int], Callable[[], Any] | None] = {}

    def prepare(self, name: Hashable, num_rows: int, function: Callable[[Rows], Tensors]) -> None:
        """Capture what `function` computes of a shape for so many rows, unless that was done or cannot be."""
        key = name, self._bucket(num_rows)
        if key[1] and key not in self._replays:
            self._replays[key] = self._captured(name, partial(function, self._rows(key[1])))

    def __call__(
        self, name: Hashable, slots: Sequence[int], counts: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Any] | None:
        """Replay what was prepared, of rows with these slots and counts; return None if nothing was.

        Return the slots on the device, and the results, both of a whole shape: surplus rows are behind the others.
        Without counts those are what they were, as far as the slots are.
        """
        size = self._bucket(len(slots))
        replay = self._replays.get((name, size))
        if replay is None:
            return None
        self._send(size, slots, counts)
        return self._columns[0, :size], replay()

    def _bucket(self, num_rows: int) -> int:
        """Return the rows of a shape that holds `num_rows`; 0: they are launched operation by operation."""
        if self._capture is None or num_rows > MAX_ROWS:
            return 0
        return _ROWS[bisect_left(_ROWS, num_rows)]

    def _rows(self, size: int) -> Rows:
        slots, counts = self._columns[:, :size]
        return Rows(slots, counts, counts, self._context_len[:size])

    def _send(self, size: int, slots: Sequence[int], counts: Sequence[int] | None) -> None:
        """Fill the rows of a shape unless they are there."""
        there = size, tuple(slots)
        if counts is None and there == self._sent:
            return
        surplus = (0,) * (size - len(slots))
        sent = self._table.to_device((*slots, *surplus, *(counts or slots), *surplus), torch.int64)
        self._columns[:, :size].copy_(sent.view(2, size), non_blocking=True)
        self._sent = there

    def _captured(self, name: Hashable, function: Callable[[], Tensors]) -> Callable[[], Tensors] | None:
        assert self._capture is not None
        # All rows are padding: what they compute is read by nobody.
        self._columns.zero_()
        self._sent = None
        try:
            replay, out = self._capture(function)
        except StartupError:
            # On several ranks, whose drafts must have the same bits.
            raise
        except Exception as error:
            _LOG.warning("cannot capture %s drafts: they are launched one by one", name, exc_info=error)
            return None

        def replayed() -> Tensors:
            replay()
            return out

        return replayed
