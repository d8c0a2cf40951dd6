"""Replays of what drafters compute: their forwards are short, and many launches take longer than the kernels.

A forward is captured at its first use, which is in the warm-up, for the next larger bucket of rows: surplus rows carry
slot 0 and compute nothing. What is sampled behind it is launched as ever.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from photon_grpc.runner.buckets import DECODE_BUCKETS
from photon_grpc.runner.graphs import Capture, Tensors
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Rows

_LOG = logging.getLogger(__name__)

#: More rows are launched operation by operation.
MAX_ROWS = 64


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
        #: Int64 []: the number of the draft that is computed.
        self.number = torch.zeros((), dtype=torch.int64, device=table.device)
        self._replays: dict[tuple[str, int], Callable[[], Any] | None] = {}

    def bucket(self, num_rows: int) -> int:
        """Return the rows of a shape that holds `num_rows`; 0: they are launched operation by operation."""
        if self._capture is None or num_rows > MAX_ROWS:
            return 0
        return DECODE_BUCKETS[bisect_left(DECODE_BUCKETS, num_rows)]

    def rows(self, size: int) -> Rows:
        """Return the rows of a shape; each computes `counts` tokens."""
        slots, counts = self._columns[:, :size]
        return Rows(slots, counts, counts, self._context_len[:size])

    def send(self, slots: Sequence[int], counts: Sequence[int], size: int) -> None:
        """Fill the rows of a shape."""
        surplus = (0,) * (size - len(slots))
        sent = self._table.to_device((*slots, *surplus, *counts, *surplus), torch.int64)
        self._columns[:, :size].copy_(sent.view(2, size), non_blocking=True)

    def replay(self, name: str, size: int, function: Callable[[], Tensors]) -> Callable[[], Tensors] | None:
        """Return what computes `function` over the rows of a shape, into the same tensors; None if it cannot.

        The rows are padding afterwards if it was not called before.
        """
        key = name, size
        if key not in self._replays:
            self._replays[key] = self._captured(name, function)
        return self._replays[key]

    def _captured(self, name: str, function: Callable[[], Tensors]) -> Callable[[], Tensors] | None:
        assert self._capture is not None
        self._columns.zero_()
        try:
            replay, out = self._capture(function)
        except Exception as error:
            _LOG.warning("cannot capture %s drafts: they are launched one by one", name, exc_info=error)
            return None

        def replayed() -> Tensors:
            replay()
            return out

        return replayed
