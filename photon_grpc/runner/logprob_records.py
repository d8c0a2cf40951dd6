"""Log-probabilities of a step as records: those of prompts are made here, and all are cut for each row."""

from __future__ import annotations

from collections.abc import Container
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from photon_grpc.core.batch import Batch
from photon_grpc.core.logprobs import LogprobParams
from photon_grpc.kernels import Kernels
from photon_grpc.runner.sampler import Head
from photon_grpc.runner.slot_table import SlotTable

#: Positions of prompts whose logits are made at a time.
SLICE = 64


class Span(NamedTuple):
    """A row's part of LogprobRecords: positions start ... start + count - 1, the first `size` records of each."""

    row: int
    start: int
    count: int
    size: int


class LogprobRecords(NamedTuple):
    """Records int32 [P, width, 3] of P positions, as in `kernels/sampling/logprobs.py`."""

    records: torch.Tensor
    spans: tuple[Span, ...]

    def kept(self, lengths: dict[int, int]) -> LogprobRecords:
        """Return the records of the first positions of each row, this many."""
        return self._replace(spans=tuple(span._replace(count=lengths[span.row]) for span in self.spans))

    def cut(self, faults: Container[int]) -> dict[int, bytes]:
        """Map rows without a fault to their packed records, once these are on the host."""
        records, spans = self.records.numpy(), self.spans
        return {
            row: records[start : start + count, :size].tobytes()
            for row, start, count, size in spans
            if row not in faults
        }


NO_RECORDS = LogprobRecords(torch.empty((0, 0, 3), dtype=torch.int32), ())


def output_records(records: torch.Tensor | None, batch: Batch, params: dict[int, LogprobParams]) -> LogprobRecords:
    """Return the records of rows that yield and ask for log-probabilities.

    `records` has one position a row; with drafts one for each id that a row may yield, row after row.
    """
    if records is None:
        return NO_RECORDS
    if batch.drafts:
        starts = accumulate(batch.yields, initial=0)
        rows = enumerate(zip(batch.slots, batch.yields, starts, strict=False))
        return LogprobRecords(
            records,
            tuple(
                Span(row, start, yields, params[slot].num_records)
                for row, (slot, yields, start) in rows
                if yields and slot in params
            ),
        )
    columns = enumerate(zip(batch.slots, batch.yields, strict=True))
    wanted = [(row, params[slot].num_records) for row, (slot, yields) in columns if yields and slot in params]
    return LogprobRecords(records, tuple(Span(row, row, 1, size) for row, size in wanted))


class PromptLogprobRecorder:
    """Log-probabilities of prompts from the hidden states of the ids before, a slice of positions at a time.

    Args:
        head: makes logits.
        table: the ids of the prompts, and what their requests ask for.
        kernels: have the kernel of log-probabilities.
    """

    def __init__(self, head: Head, table: SlotTable, kernels: Kernels) -> None:
        self._head = head
        self._table = table
        self._logprobs = kernels.logprobs

    def __call__(self, batch: Batch, hidden: torch.Tensor) -> LogprobRecords:
        """Return the records of the rows of `batch.prompt_logprob_rows`.

        `hidden` [T, hidden_size]: the hidden states of all tokens of the batch, row after row.
        """
        if not batch.prompt_logprob_rows:
            return NO_RECORDS
        parts = [self._positions(batch, row, first) for row, first in batch.prompt_logprob_rows]
        sizes = [self._prompt(batch, row)[0].num_prompt_records for row, _ in batch.prompt_logprob_rows]
        counts = [part.shape[1] for part in parts]
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        rows = [row for row, _ in batch.prompt_logprob_rows]
        spans = tuple(map(Span, rows, starts, counts, sizes))
        return LogprobRecords(self._records(np.concatenate(parts, axis=1), max(sizes), hidden), spans)

    def _prompt(self, batch: Batch, row: int) -> tuple[LogprobParams, int]:
        return self._table.prompt_logprob_params[batch.slots[row]]

    def _positions(self, batch: Batch, row: int, first: int) -> np.ndarray:
        """Return int64 [3, n] of a row's n positions: index of the hidden state that predicts it, slot, position."""
        slot, count = batch.slots[row], batch.counts[row]
        # Exact: no token is drafted before a prompt is computed.
        computed = self._table.max_computed[slot]
        _, num_prompt = self._prompt(batch, row)
        positions = np.arange(first, min(computed + count + 1, num_prompt))
        token = sum(batch.counts[:row]) - computed - 1 + positions
        return np.stack([token, np.full_like(positions, slot), positions])

    def _records(self, positions: np.ndarray, width: int, hidden: torch.Tensor) -> torch.Tensor:
        table, num_positions = self._table, positions.shape[1]
        # Every column begins at a multiple of 16 bytes: a kernel is compiled anew for pointers that do not.
        sent = table.to_device(np.pad(positions, ((0, 0), (0, num_positions % 2))).tolist(), torch.int64)
        records = torch.empty((num_positions, width, 3), dtype=torch.int32, device=hidden.device)
        for start in range(0, num_positions, SLICE):
            token, slots, position = sent[:, start : min(start + SLICE, num_positions)]
            ids = table.token_ids[slots, position].long()
            found = self._logprobs(self._head.logits(hidden[token]), ids, table.prompt_logprobs(slots))
            records[start : start + SLICE] = found[:, :width]
        return records
