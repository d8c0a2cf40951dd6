"""Drafters: they write tokens that may come next behind the known ids of their slots.

Any draft is lossless, because a step keeps the ids that the model samples itself: a draft only decides how many. So a
drafter may be wrong, stale or damaged; it must write ids of the vocabulary, and nothing but them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.core.kv import KVGroup
from photon_grpc.errors import InternalFailure
from photon_grpc.kernels import Kernels
from photon_grpc.runner.graphs import Capture
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.slot_table import SlotTable


class Drafter(Protocol):
    @property
    def max_drafts(self) -> int:
        """The most drafts of a row that it makes."""

    def draft(self, batch: Batch) -> None:
        """Write `yields - 1` ids behind the known ones of every row of a batch with drafts, without waiting.

        The changes of the batch are applied; its body is launched next.
        """

    def ingest(self, batch: Batch) -> None:
        """Read the known tokens of a batch whose body is launched and whose ids are not sampled, without waiting."""


class NoDrafter:
    """A drafter that makes no drafts."""

    max_drafts: int = 0

    def draft(self, batch: Batch) -> None:
        raise InternalFailure(f"step {batch.step} has drafts, and there is no drafter")

    def ingest(self, batch: Batch) -> None:
        """Do nothing."""


class GivenDrafter:
    """A drafter that leaves all drafts to the engine.

    Args:
        max_drafts: the most drafts of a row.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def draft(self, batch: Batch) -> None:
        """Do nothing: what stands behind the known ids of a row without given drafts is refused."""

    def ingest(self, batch: Batch) -> None:
        """Do nothing."""


class NgramDrafter:
    """A drafter that looks for a row's newest ids among its older ones.

    Args:
        max_drafts: the most drafts of a row.
        table: the ids of every slot.
        kernels: have the search.
    """

    def __init__(self, max_drafts: int, table: SlotTable, kernels: Kernels) -> None:
        self.max_drafts = max_drafts
        self._table = table
        self._ngram = kernels.ngram

    def draft(self, batch: Batch) -> None:
        slots, num_drafts = drafting_rows(batch, self._table)
        self._ngram(slots, num_drafts, self._table.state)

    def ingest(self, batch: Batch) -> None:
        """Do nothing: the ids are in the slot table."""


def drafting_rows(batch: Batch, table: SlotTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (slots, number of drafts) int64 of the rows that draft, on the device."""
    rows = [(slot, yields - 1) for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields > 1]
    # Both columns begin at a multiple of 16 bytes: a kernel is compiled anew for pointers that do not.
    padded = rows + [(0, 0)] * (len(rows) % 2)
    slots, numbers = table.to_device(list(zip(*padded, strict=True)), torch.int64)
    return slots[: len(rows)], numbers[: len(rows)]


def write_drafts(table: SlotTable, slots: torch.Tensor, number: int, sample: Callable[..., torch.Tensor]) -> None:
    """Write draft `number` of each slot, counted from 0: the ids that `sample` returns of slots and places.

    What cannot be sampled becomes id 0, which is refused.
    """
    places = table.numbers.num_known[slots] + number
    table.token_ids[slots, places] = sample(slots, places).clamp(min=0).int()


class Speculation(Protocol):
    """The way in which a runner drafts."""

    @property
    def max_drafts(self) -> int: ...

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups of the draft model, whose keys and values share the blocks of the served model."""

    def drafter(self, table: SlotTable, kernels: Kernels, cache: KVCache, capture: Capture | None) -> Drafter:
        """Make the drafter of a runner; `capture` makes replays of what it computes, None: nothing is captured."""


@dataclass(frozen=True, slots=True)
class NoSpeculation:
    """No step drafts."""

    max_drafts: ClassVar[int] = 0
    kv_groups: ClassVar[tuple[KVGroup, ...]] = ()

    def drafter(self, table: SlotTable, kernels: Kernels, cache: KVCache, capture: Capture | None) -> Drafter:
        return NoDrafter()


NO_SPECULATION = NoSpeculation()


@dataclass(frozen=True, slots=True)
class NgramSpeculation:
    """Drafts by prompt lookup."""

    max_drafts: int
    kv_groups: ClassVar[tuple[KVGroup, ...]] = ()

    def drafter(self, table: SlotTable, kernels: Kernels, cache: KVCache, capture: Capture | None) -> Drafter:
        return NgramDrafter(self.max_drafts, table, kernels)


@dataclass(frozen=True, slots=True)
class GivenSpeculation:
    """Drafts that the engine knows from the constraints of outputs, and no others."""

    max_drafts: int
    kv_groups: ClassVar[tuple[KVGroup, ...]] = ()

    def drafter(self, table: SlotTable, kernels: Kernels, cache: KVCache, capture: Capture | None) -> Drafter:
        return GivenDrafter(self.max_drafts)
