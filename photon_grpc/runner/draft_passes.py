"""The order in which a drafter with a model of its own drafts: a pass over all rows for each draft.

the first pass -> draft 1 of each row; each further one -> one draft more of the rows that want it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.runner.draft_graphs import DraftGraphs
from photon_grpc.runner.drafting import write_drafts
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Bounds, Rows, StepShape


class PassDrafter(ABC):
    """A drafter that computes a pass for each draft.

    Args:
        max_drafts: the most drafts of a row.
        table: the slots of the served model.
        sampler: draws drafts.
        graphs: replay forwards; "further" is prepared by the first pass.
    """

    #: The pass that has draft n computes the position `number of known ids` + n - LAG.
    LAG: ClassVar[int]

    def __init__(self, max_drafts: int, table: SlotTable, sampler: Sampler, graphs: DraftGraphs) -> None:
        self.max_drafts = max_drafts
        self._table = table
        self._sampler = sampler
        self._graphs = graphs

    def draft(self, batch: Batch) -> None:
        numbers = {slot: yields - 1 for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields > 1}
        # Those with most drafts first, so that the rows of every pass are the first ones.
        slots = sorted(numbers, key=lambda slot: -numbers[slot])
        level = self._sampler.draft_level(slots)
        sent = self._draft_first(slots, level)
        for number in range(1, numbers[slots[0]]):
            slots = slots[: sum(numbers[slot] > number for slot in slots)]
            sent = self._draft_next(slots, sent[: len(slots)], number, level)

    @abstractmethod
    def _draft_first(self, slots: list[int], level: SamplingLevel) -> torch.Tensor:
        """Write the first draft of every row; return the slots on the device."""

    @abstractmethod
    def _next(self, rows: Rows, behind: int | torch.Tensor, longest: int) -> torch.Tensor:
        """Compute the position `behind` the number of known ids of every row; return the hidden states behind it."""

    def _draft_next(self, slots: list[int], sent: torch.Tensor, number: int, level: SamplingLevel) -> torch.Tensor:
        """Compute draft `number` of every row, and write the one behind it; return the slots, `sent` before."""
        table, graphs, behind = self._table, self._graphs, number - self.LAG
        graphs.behind.fill_(behind)
        replayed = graphs("further", slots)
        if replayed is None:
            rows = Rows(sent, sent, sent, torch.empty(len(sent), dtype=torch.int32, device=table.device))
            longest = min(max(table.max_computed) + self.max_drafts + 1, table.token_ids.shape[1])
            replayed = sent, self._next(rows, behind, longest)
        sent, hidden = replayed
        self._write(hidden, sent, number, level)
        return sent

    def _send(self, parts: Sequence[tuple[int, int]], num_ahead: int = 0) -> tuple[Rows, StepShape, Bounds]:
        """Return the rows that compute these parts (slot, tokens), of contexts to so many tokens behind them."""
        table, counts = self._table, [count for _, count in parts]
        odd = [(0, 0)] * (len(parts) % 2)
        # Both columns begin at a multiple of 16 bytes: a kernel is compiled anew for pointers that do not.
        sent = table.to_device(list(zip(*parts, *odd, strict=True)), torch.int64)[:, : len(parts)]
        context_len = torch.empty(len(parts), dtype=torch.int32, device=table.device)
        longest = max(table.max_computed[slot] + count for slot, count in parts) + num_ahead
        bounds = Bounds(max(counts), min(counts), min(longest, table.token_ids.shape[1]))
        return Rows(sent[0], sent[1], sent[1], context_len), StepShape("mixed", sum(counts), len(parts)), bounds

    def _write(self, hidden: torch.Tensor, slots: torch.Tensor, number: int, level: SamplingLevel) -> None:
        write_drafts(self._table, slots, number, lambda slots, places: self._sampler(hidden, slots, places, level).ids)
