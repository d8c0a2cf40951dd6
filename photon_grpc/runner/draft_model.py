"""Drafts by a smaller model with the vocabulary of the served one.

Its keys and values are sections of the served model's own blocks, so prefix hits, forks and preemption need nothing
here. They may be missing or stale: then fewer drafts are right.

    draft:  the newest known tokens of each row, whose keys are missing -> draft 1; each draft -> the next one
    ingest: the tokens of prompts that a step computes

A draft is sampled as the id at its position will be: with the same noise, temperature, filters, penalties and bans,
but without masks, which are not there yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.core.kv import KVGroup
from photon_grpc.kernels import Kernels
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.draft_graphs import MAX_ROWS, DraftGraphs
from photon_grpc.runner.drafting import Drafter, write_drafts
from photon_grpc.runner.graphs import Capture
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Bounds, Rows, Step, StepShape

#: Tokens of a row that are computed before its first draft, at most; older ones that are missing stay so.
_MAX_MISSING = 256
#: Tokens of a row that a replay computes before the first draft, at most.
_WIDTHS = (2, 8)
#: After drafting, the last draft's key is missing if it was kept, and that of the id sampled behind it.
_LEAST_MISSING = 2


class _Part(NamedTuple):
    """Tokens of one row that the draft model computes."""

    slot: int
    count: int


class ModelDrafter:
    """A drafter that is a smaller model.

    Args:
        max_drafts: the most drafts of a row.
        decoder: the smaller model.
        table: the slots of the served model.
        cache: the pages of both models.
        graphs: replay forwards.
    """

    def __init__(
        self, max_drafts: int, decoder: Decoder, table: SlotTable, cache: KVCache, graphs: DraftGraphs
    ) -> None:
        self._graphs = graphs
        self.max_drafts = max_drafts
        self._table = table
        self._kernels: Kernels = decoder.kernels
        max_rows = max(table.num_slots, MAX_ROWS)
        self._step = Step(decoder, table, cache.pages, decoder.kernels, max_rows, is_guest=True)
        self._sampler = Sampler(decoder, table, decoder.kernels, has_masks=False)
        #: Slot -> its newest known tokens whose keys are missing. Not for slots whose prompt is not computed.
        self._missing: dict[int, int] = {}

    def draft(self, batch: Batch) -> None:
        numbers = {slot: yields - 1 for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields > 1}
        # Those with most drafts first, so that the rows of every pass are the first ones.
        slots = sorted(numbers, key=lambda slot: -numbers[slot])
        level = self._sampler.draft_level(slots)
        sent = self._draft_first([_Part(slot, self._width(slot)) for slot in slots], level)
        for number in range(1, numbers[slots[0]]):
            slots = slots[: sum(numbers[slot] > number for slot in slots)]
            sent = self._draft_next(slots, sent[: len(slots)], number, level)

    def ingest(self, batch: Batch) -> None:
        rows = zip(batch.slots, batch.counts, batch.yields, strict=True)
        known = [_Part(slot, count - max(yields - 1, 0)) for slot, count, yields in rows]
        new = {admission.slot for admission in batch.admissions}
        prompts = [part for part in known if part.count > 1 or part.slot in new]
        if prompts:
            rows_sent, shape, bounds = self._send(prompts)
            self._step.forward(rows_sent, shape, bounds)
        for (slot, count), yields in zip(known, batch.yields, strict=True):
            is_decoded = count == 1 and yields == 1 and slot not in new
            self._missing[slot] = self._missing.get(slot, 1) + 1 if is_decoded else _LEAST_MISSING

    def _width(self, slot: int) -> int:
        """Return the tokens to compute before the first draft; the row has that many and one more."""
        missing = self._missing.get(slot, _LEAST_MISSING)
        return min(missing, _MAX_MISSING, self._table.min_computed(slot) + 1)

    def _send(self, parts: list[_Part]) -> tuple[Rows, StepShape, Bounds]:
        """Return the rows that compute these tokens."""
        table, counts = self._table, [part.count for part in parts]
        odd = [(0, 0)] * (len(parts) % 2)
        # Both columns begin at a multiple of 16 bytes: a kernel is compiled anew for pointers that do not.
        sent = table.to_device(list(zip(*parts, *odd, strict=True)), torch.int64)[:, : len(parts)]
        context_len = torch.empty(len(parts), dtype=torch.int32, device=table.device)
        longest = max(table.max_computed[part.slot] + part.count for part in parts) + self.max_drafts
        bounds = Bounds(max(counts), min(counts), min(longest, table.token_ids.shape[1]))
        return Rows(sent[0], sent[1], sent[1], context_len), StepShape("mixed", sum(counts), len(parts)), bounds

    def _draft_first(self, parts: list[_Part], level: SamplingLevel) -> torch.Tensor:
        """Compute the tokens up to the newest known one, and write the draft behind it; return the slots."""
        slots, counts = zip(*parts, strict=True)
        self._prepare(len(parts))
        width = next((width for width in _WIDTHS if width >= max(counts)), 0)
        replayed = self._graphs(width, slots, counts)
        if replayed is None:
            rows, shape, bounds = self._send(parts)
            replayed = rows.slots, self._first(rows, shape, bounds)
        sent, hidden = replayed
        self._write(hidden, sent, 0, level)
        return sent

    def _prepare(self, num_rows: int) -> None:
        """Prepare all replays of so many rows."""
        longest = self._table.token_ids.shape[1]

        def first(width: int, rows: Rows) -> torch.Tensor:
            size = len(rows.slots)
            return self._first(rows, StepShape("mixed", width * size, size), Bounds(width, 1, longest))

        for width in _WIDTHS:
            self._graphs.prepare(width, num_rows, partial(first, width))
        self._graphs.prepare("further", num_rows, lambda rows: self._next(rows, self._graphs.behind, longest))

    def _first(self, rows: Rows, shape: StepShape, bounds: Bounds) -> torch.Tensor:
        """Compute `counts` tokens of every row up to its newest known one; return the hidden states behind them."""
        table = self._table
        first = table.num_known.clone()
        first[rows.slots] -= rows.counts
        found, hidden = self._step.forward(rows, shape, bounds, table.state._replace(num_computed=first))
        return hidden[found.last]

    def _draft_next(self, slots: list[int], sent: torch.Tensor, number: int, level: SamplingLevel) -> torch.Tensor:
        """Compute draft `number` of every row, and write the one behind it; return the slots, `sent` before."""
        table, graphs = self._table, self._graphs
        graphs.behind.fill_(number - 1)
        replayed = graphs("further", slots)
        if replayed is None:
            rows = Rows(sent, sent, sent, torch.empty(len(sent), dtype=torch.int32, device=table.device))
            longest = min(max(table.max_computed) + self.max_drafts + 1, table.token_ids.shape[1])
            replayed = sent, self._next(rows, number - 1, longest)
        sent, hidden = replayed
        self._write(hidden, sent, number, level)
        return sent

    def _next(self, rows: Rows, behind: int | torch.Tensor, longest: int) -> torch.Tensor:
        """Compute the draft `behind` the first of every row; return the hidden states behind them."""
        # Slot 0, which captures compute, knows nothing: it has no position -1.
        first = (self._table.num_known + behind).clamp(min=0)
        state = self._table.state._replace(num_computed=first)
        return self._step.decode(rows, Bounds(1, 1, longest), state)

    def _write(self, hidden: torch.Tensor, slots: torch.Tensor, number: int, level: SamplingLevel) -> None:
        write_drafts(self._table, slots, number, lambda slots, places: self._sampler(hidden, slots, places, level).ids)


@dataclass(frozen=True, slots=True)
class ModelSpeculation:
    """Drafts by a smaller model, loaded."""

    max_drafts: int
    decoder: Decoder

    @property
    def guests(self) -> tuple[KVGroup, ...]:
        return self.decoder.kv_groups

    def drafter(self, table: SlotTable, kernels: Kernels, cache: KVCache, capture: Capture | None) -> Drafter:
        return ModelDrafter(self.max_drafts, self.decoder, table, cache, DraftGraphs(capture, table))
