"""Slots that a failed step has left unusable.

A step that fails may have been applied in part, or not at all: its slots may hold the tables of sequences before, and
steps that are launched before it is read would write into blocks of others. Such a slot is poisoned until another
sequence is admitted to it; until then its rows are faults and are not computed, while other rows of their batches
are.
"""

from __future__ import annotations

from itertools import islice, repeat

import msgspec

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.fault import Fault
from photon_grpc.core.ports import Pending
from photon_grpc.errors import InternalFailure

STANDS_ON_FAILED = Fault.of(InternalFailure("a step before this one could not be computed"))


class PoisonedSlots:
    """The poisoned slots; `unpoisoned` is called with every batch in order, `failed` with every one that fails."""

    def __init__(self) -> None:
        self._slots: set[int] = set()

    def failed(self, batch: Batch) -> None:
        """Poison the slots that this batch has, changes or fills: their state is unknown."""
        self._slots.update(batch.slots)
        self._slots.update(admission.slot for admission in batch.admissions)
        self._slots.update(growth.slot for growth in batch.grown)

    def unpoisoned(self, batch: Batch) -> Batch:
        """Return the batch without the rows that depend on a failed step."""
        if not self._slots:
            return batch
        self._slots.difference_update(admission.slot for admission in batch.admissions)
        if self._slots.isdisjoint(batch.slots):
            return batch
        rows = [row for row, slot in enumerate(batch.slots) if slot not in self._slots]
        place = {row: at for at, row in enumerate(rows)}
        return msgspec.structs.replace(
            batch,
            slots=tuple(batch.slots[row] for row in rows),
            counts=tuple(batch.counts[row] for row in rows),
            yields=tuple(batch.yields[row] for row in rows),
            grown=tuple(growth for growth in batch.grown if growth.slot not in self._slots),
            masked=tuple(place[row] for row in batch.masked if row in place),
            prompt_logprob_rows=tuple((place[row], first) for row, first in batch.prompt_logprob_rows if row in place),
            given=tuple(each for each in batch.given if each[0] not in self._slots),
        )


class UnpoisonedRows:
    """The launched rows of a batch without poisoned slots; the result is that of the whole batch.

    Args:
        pending: the step of `unpoisoned`.
        batch: what was submitted.
        unpoisoned: the batch that `PoisonedSlots.unpoisoned` returned.
    """

    def __init__(self, pending: Pending, batch: Batch, unpoisoned: Batch) -> None:
        self._pending = pending
        self._batch = batch
        self._slots = set(unpoisoned.slots)

    def drafts(self) -> tuple[int, ...]:
        drafts = self._pending.drafts()
        if not drafts:
            return ()
        found, count = iter(drafts), self._batch.drafts
        rows = (islice(found, count) if is_sound else repeat(-1, count) for is_sound in self._masked_rows())
        return tuple(draft for row in rows for draft in row)

    def sample(self, masks: memoryview) -> None:
        width = len(masks) // len(self._batch.masked)
        sound = [at * width for at, is_sound in enumerate(self._masked_rows()) if is_sound]
        if sound:
            self._pending.sample(memoryview(bytearray().join(masks[start : start + width] for start in sound)))

    def result(self) -> StepOutput:
        output = self._pending.result()
        slots, yields = self._batch.slots, self._batch.yields
        sampled, lengths_left = iter(output.ids), iter(output.lengths) if output.lengths else repeat(1)
        ids: list[int] = []
        lengths: list[int] = []
        for slot in (slot for slot, wants in zip(slots, yields, strict=True) if wants):
            lengths.append(next(lengths_left) if slot in self._slots else 1)
            ids += islice(sampled, lengths[-1]) if slot in self._slots else (0,)
        rows = [row for row, slot in enumerate(slots) if slot in self._slots]
        faults = {row: STANDS_ON_FAILED for row, slot in enumerate(slots) if slot not in self._slots}
        faults |= {rows[row]: fault for row, fault in output.faults.items()}
        return msgspec.structs.replace(
            output,
            ids=tuple(ids),
            faults=faults,
            lengths=tuple(lengths) if output.lengths else (),
            logprobs={rows[row]: records for row, records in output.logprobs.items()},
            prompt_logprobs={rows[row]: records for row, records in output.prompt_logprobs.items()},
        )

    def _masked_rows(self) -> list[bool]:
        """Return for each masked row of the whole batch whether its slot is not poisoned."""
        return [self._batch.slots[row] in self._slots for row in self._batch.masked]
