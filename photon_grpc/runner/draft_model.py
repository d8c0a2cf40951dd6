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

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.core.kv import KVGroup
from photon_grpc.kernels import Kernels
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.draft_graphs import MAX_ROWS, DraftGraphs
from photon_grpc.runner.draft_passes import PassDrafter
from photon_grpc.runner.drafting import Drafter
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


class ModelDrafter(PassDrafter):
    """A drafter that is a smaller model.

    Args:
        max_drafts: the most drafts of a row.
        decoder: the smaller model.
        table: the slots of the served model.
        cache: the pages of both models.
        graphs: replay forwards.
    """

    LAG = 1

    def __init__(
        self, max_drafts: int, decoder: Decoder, table: SlotTable, cache: KVCache, graphs: DraftGraphs
    ) -> None:
        super().__init__(max_drafts, table, Sampler(decoder, table, decoder.kernels, has_masks=False), graphs)
        max_rows = max(table.num_slots, MAX_ROWS)
        self._step = Step(decoder, table, cache.pages, decoder.kernels, max_rows, is_draft_model=True)
        #: Slot -> its newest known tokens whose keys are missing. Not for slots whose prompt is not computed.
        self._missing: dict[int, int] = {}

    def ingest(self, batch: Batch) -> None:
        rows = zip(batch.slots, batch.counts, batch.yields, strict=True)
        known = [(slot, count - max(yields - 1, 0)) for slot, count, yields in rows]
        new = {admission.slot for admission in batch.admissions}
        of_prompts = [(slot, count) for slot, count in known if count > 1 or slot in new]
        prompts = [each for each in of_prompts if each[0] not in self._table.undrafted]
        if prompts:
            self._step.forward(*self._send(prompts, self.max_drafts))
        for (slot, count), yields in zip(known, batch.yields, strict=True):
            is_decoded = count == 1 and yields == 1 and slot not in new
            self._missing[slot] = self._missing.get(slot, 1) + 1 if is_decoded else _LEAST_MISSING

    def _width(self, slot: int) -> int:
        """Return the tokens to compute before the first draft; the row has that many and one more."""
        missing = self._missing.get(slot, _LEAST_MISSING)
        return min(missing, _MAX_MISSING, self._table.min_computed(slot) + 1)

    def _draft_first(self, slots: list[int], level: SamplingLevel) -> torch.Tensor:
        """Compute the tokens up to the newest known one, and write the draft behind it; return the slots."""
        counts = [self._width(slot) for slot in slots]
        self._prepare(len(slots))
        width = next((width for width in _WIDTHS if width >= max(counts)), 0)
        replayed = self._graphs(width, slots, counts)
        if replayed is None:
            rows, shape, bounds = self._send(list(zip(slots, counts, strict=True)), self.max_drafts)
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
        first = table.numbers.num_known.clone()
        first[rows.slots] -= rows.counts
        found, hidden = self._step.forward(rows, shape, bounds, table.state._replace(num_computed=first))
        return hidden[found.last]

    def _next(self, rows: Rows, behind: int | torch.Tensor, longest: int) -> torch.Tensor:
        """Compute the draft `behind` the first of every row; return the hidden states behind them."""
        # Slot 0, which captures compute, knows nothing: it has no position -1.
        first = (self._table.numbers.num_known + behind).clamp(min=0)
        state = self._table.state._replace(num_computed=first)
        return self._step.decode(rows, Bounds(1, 1, longest), state)


@dataclass(frozen=True, slots=True)
class ModelSpeculation:
    """Drafts by a smaller model, loaded."""

    max_drafts: int
    decoder: Decoder

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.decoder.kv_groups

    def drafter(self, table: SlotTable, kernels: Kernels, cache: KVCache, capture: Capture | None) -> Drafter:
        return ModelDrafter(self.max_drafts, self.decoder, table, cache, DraftGraphs(capture, table))
