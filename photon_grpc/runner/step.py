"""One step on tensors: inputs, body, tail, state. `EagerStep` launches operation by operation; `graphs.py` replays the same."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple, Protocol

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.inputs import prepare
from photon_grpc.runner.sampler import Sampler
from photon_grpc.runner.slot_table import SlotTable


class SampledTokens(NamedTuple):
    """What a step has put on the device: int64 ids, and which of them belong to the rows that yield, in order (None: all)."""

    ids: torch.Tensor
    rows: list[int] | None = None


class Step(Protocol):
    def __call__(self, batch: Batch) -> SampledTokens:
        """Computes the batch, whose changes are applied already; does not wait for the device."""


class EagerStep:
    """Any batch, launched operation by operation.

    Args:
        decoder, table, pages, tail: the model, the slots, the KV cache, the end of the step.
        row_buckets: how many rows of logits are computed at a time; the next one up is taken. A device loads a kernel when it first meets a
            shape, which takes longer than the step. None: as many as are needed.
    """

    def __init__(
        self,
        decoder: Decoder,
        table: SlotTable,
        pages: torch.Tensor,
        tail: Sampler,
        row_buckets: tuple[int, ...] = (),
    ) -> None:
        self._row_buckets = row_buckets
        self._decoder = decoder
        self._table = table
        self._pages = pages
        self._tail = tail

    def __call__(self, batch: Batch) -> SampledTokens:
        table = self._table
        inputs = prepare(batch, table, self._pages, self._decoder)
        hidden = self._decoder.forward(inputs.token_ids, inputs.ctx)
        table.num_computed[inputs.slots] = inputs.context_len
        if not inputs.last.numel():
            return SampledTokens(inputs.last)
        num_rows = inputs.last.numel()
        host_slots = [slot for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields]
        slots, context_len = inputs.slots[inputs.drawing], inputs.context_len[inputs.drawing]
        last, padded_slots, lengths = (self._padded(column) for column in (inputs.last, slots, context_len))
        ids = self._tail(hidden[last], padded_slots, lengths, self._tail.width(host_slots))[:num_rows]
        # An invalid id ends its sequence when it is read; until then the table must hold one that can be looked up.
        table.token_ids[slots, context_len] = ids.clamp(min=0).int()
        return SampledTokens(ids)

    def _padded(self, column: torch.Tensor) -> torch.Tensor:
        """With surplus rows of token 0 and slot 0 up to the next bucket."""
        num_rows = column.shape[0]
        at = bisect_left(self._row_buckets, num_rows)
        if at == len(self._row_buckets) or self._row_buckets[at] == num_rows:
            return column
        return torch.nn.functional.pad(column, (0, self._row_buckets[at] - num_rows))
