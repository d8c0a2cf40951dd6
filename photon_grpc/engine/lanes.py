"""Counts what the rows of steps compute, by sequence and slot, between two pictures of the engine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Columns
from typing import NamedTuple

from msgspec.structs import replace

from photon_grpc.core.batch import Batch
from photon_grpc.core.engine_picture import MAX_LANES_PER_SLOT, Lane, Mark, StepWork
from photon_grpc.core.sequence import Sequence, Status

_NO_MARK = Mark(0)


class _StepRows(NamedTuple):
    """A launched step: its rows that prefill and those that decode."""

    step: int
    prefill: list[tuple[Sequence, int]]
    decode: Columns[Sequence]
    decode_counts: Columns[int]


class _SlotOccupant:
    """A sequence in a slot, until no step in flight computes it any more."""

    __slots__ = ("cached_tokens", "marks", "slot")

    def __init__(self, slot: int, cached_tokens: int, marks: Mark) -> None:
        self.slot = slot
        self.cached_tokens = cached_tokens
        #: Since the last `take`.
        self.marks = marks


class Lanes:
    """All stays since the last `take`, and the tokens that settled steps computed in them.

    The prefill of a stay ends with the first row that yields an id.
    """

    def __init__(self, num_slots: int, running: Iterable[Sequence]) -> None:
        """Begin with the `running` sequences; their rows in flight are not counted."""
        self._max_lanes = MAX_LANES_PER_SLOT * num_slots
        self._launched: deque[_StepRows] = deque()
        seated = [seq for seq in running if seq.status is Status.RUNNING]
        self._stays = {seq: _SlotOccupant(seq.slot, seq.num_cached, _NO_MARK) for seq in seated}
        self._prefilling = {seq for seq in seated if not _decodes(seq)}
        self._prefilled: Counter[Sequence] = Counter()
        self._decoded: Counter[Sequence] = Counter()
        #: Earlier stays of sequences that have another slot now.
        self._earlier: list[Lane] = []

    def launching(self, batch: Batch, rows: Columns[Sequence]) -> None:
        if batch.admissions:
            for seq in rows:
                if seq.admitted_step == batch.step:
                    self._admitted(seq)
        if not self._prefilling:
            self._launched.append(_StepRows(batch.step, [], rows, batch.counts))
            return
        step = _StepRows(batch.step, [], decode := [], counts := [])
        for seq, count, yields in zip(rows, batch.counts, batch.yields, strict=True):
            if seq not in self._prefilling:
                decode.append(seq)
                counts.append(count)
                continue
            step.prefill.append((seq, count))
            if yields:
                self._prefilling.discard(seq)
        self._launched.append(step)

    def settled(self, number: int, duration_s: float) -> StepWork | None:
        """Count a step and return its work; return None if it was launched before the first `launching`."""
        if not self._launched or self._launched[0].step != number:
            return None
        step = self._launched.popleft()
        for seq, count in step.prefill:
            self._prefilled[seq] += count
        num_decoded = sum(step.decode_counts)
        if num_decoded == len(step.decode):
            self._decoded.update(step.decode)
        else:
            for seq, count in zip(step.decode, step.decode_counts, strict=True):
                self._decoded[seq] += count
        return StepWork(round(duration_s, 6), sum(count for _, count in step.prefill), num_decoded)

    def preempted(self, names: Iterable[tuple[int, int]]) -> None:
        """Mark the sequences with these front ends and handles."""
        wanted = set(names)
        for seq, stay in self._stays.items():
            if (seq.frontend, seq.handle) in wanted:
                stay.marks |= Mark.PREEMPTED

    def take(self) -> tuple[Lane, ...]:
        """Return the lanes of all stays since the last call, or the most for a picture, and forget those that ended."""
        lanes, self._earlier = self._earlier, []
        for seq, stay in tuple(self._stays.items()):
            is_over = seq.slot != stay.slot and not seq.flights
            if is_over and seq.status is Status.FINISHED:
                stay.marks |= Mark.ENDED
            lanes.append(self._lane(seq, stay, seq.num_computed))
            stay.marks = _NO_MARK
            if is_over:
                self._forget(seq)
        return _joined(lanes, self._max_lanes)

    def _admitted(self, seq: Sequence) -> None:
        earlier = self._stays.get(seq)
        if earlier is not None:
            # It was preempted and has nothing in flight, or it would not have been admitted.
            self._earlier.append(self._lane(seq, earlier, 0))
            self._forget(seq)
        self._stays[seq] = _SlotOccupant(seq.slot, seq.num_computed, Mark.ADMITTED)
        self._prefilling.add(seq)

    def _forget(self, seq: Sequence) -> None:
        del self._stays[seq]
        self._prefilling.discard(seq)

    def _lane(self, seq: Sequence, stay: _SlotOccupant, num_computed: int) -> Lane:
        return Lane(
            slot=stay.slot - 1,
            # Its place in the order of arrivals.
            sequence=seq.rank[1],
            prompt_tokens=seq.num_given,
            cached_tokens=stay.cached_tokens,
            computed_tokens=num_computed,
            output_tokens=seq.num_generated,
            prefilled=self._prefilled.pop(seq, 0),
            decoded=self._decoded.pop(seq, 0),
            marks=int(stay.marks),
        )


def _decodes(seq: Sequence) -> bool:
    if seq.flights:
        return seq.flights[-1].may_yield > 0
    return seq.num_generated > 0 and seq.num_computed >= len(seq.ids) - 1


def _joined(lanes: list[Lane], limit: int) -> tuple[Lane, ...]:
    """Return at most `limit` lanes, no fewer than there are slots: join surplus ones with the next of their slot."""
    num_surplus = len(lanes) - limit
    kept: list[Lane] = []
    next_of: dict[int, int] = {}
    for lane in reversed(lanes):
        at = next_of.get(lane.slot)
        if num_surplus > 0 and at is not None:
            after = kept[at]
            kept[at] = replace(after, prefilled=after.prefilled + lane.prefilled, decoded=after.decoded + lane.decoded)
            num_surplus -= 1
        else:
            next_of[lane.slot] = len(kept)
            kept.append(lane)
    return tuple(reversed(kept))
