"""Sequences that wait for something other than a slot."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from photon_grpc.core.sequence import Sequence, Status

K = TypeVar("K", bound=Hashable)


class Parking(Generic[K]):
    """PARKED sequences, each waiting for one key: an Event of another thread, or the leader with its prompt."""

    def __init__(self) -> None:
        self._parked: dict[K, list[Sequence]] = {}
        self._until: dict[Sequence, K] = {}
        self.num_seqs = 0
        self.num_tokens = 0

    def park(self, seqs: Iterable[Sequence], until: K) -> None:
        for seq in seqs:
            seq.status = Status.PARKED
            self._until[seq] = until
            self._parked.setdefault(until, []).append(seq)
            self.num_seqs += 1
            self.num_tokens += len(seq.ids)

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended; ignore one that is not parked here."""
        until = self._until.pop(seq, None)
        if until is None:
            return
        self.num_seqs -= 1
        self.num_tokens -= len(seq.ids)
        self._parked[until].remove(seq)
        if not self._parked[until]:
            del self._parked[until]

    def release(self, until: K) -> list[Sequence]:
        """Remove and return the sequences that wait for `until`, in order of parking; the caller sets their status."""
        seqs = self._parked.pop(until, [])
        for seq in seqs:
            del self._until[seq]
            self.num_seqs -= 1
            self.num_tokens -= len(seq.ids)
        return seqs

    def awaited(self) -> tuple[K, ...]:
        return tuple(self._parked)
