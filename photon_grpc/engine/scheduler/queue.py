"""The sequences that wait for a slot, best rank first."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from photon_grpc.core.sequence import Rank, Sequence


def _rank(seq: Sequence) -> Rank:
    return seq.rank


def _is_unserved(seq: Sequence) -> bool:
    return seq.first_scheduled_s is None and seq.leader is None


class WaitingQueue(Protocol):
    """A queue that its user bounds. It is notified of every sequence from its first wait to its end."""

    #: Ids of the waiting sequences.
    num_tokens: int

    def __len__(self) -> int: ...

    def push(self, seq: Sequence) -> None:
        """Add a sequence, for the first time or after a preemption."""

    def first(self) -> Sequence:
        """Return the next sequence to admit."""

    def take(self, seq: Sequence) -> Rank:
        """Remove the first sequence, which got a slot; return its rank among running sequences."""

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that ends while it waits. Raise ValueError if it does not wait here."""

    def ended(self, seq: Sequence) -> None:
        """Note that a sequence has ended, in any state."""

    def longest(self) -> int:
        """Return the waiting sequences of the owner that has most; 0 if owners are not distinguished."""

    def room(self, owner: str, num_ids: int, num_seqs: int, num_tokens: int) -> list[Sequence]:
        """Return sequences to remove from a full queue for a new one of `owner` with `num_ids` ids.

        They are at least `num_seqs` sequences with at least `num_tokens` ids. If there are none, the new one is
        refused.
        """


class RankedQueue:
    """A queue sorted by rank, which is unique: (the policy's number, arrival order). It ignores owners."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._seqs)

    def push(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=_rank)
        self.num_tokens += len(seq.ids)

    def first(self) -> Sequence:
        return self._seqs[0]

    def last_unserved(self, but: list[Sequence]) -> Sequence | None:
        """Return the last sequence whose request has computed nothing, except those in `but`."""
        return next((seq for seq in reversed(self._seqs) if _is_unserved(seq) and seq not in but), None)

    def take(self, seq: Sequence) -> Rank:
        self.remove(seq)
        return seq.rank

    def remove(self, seq: Sequence) -> None:
        at = bisect_left(self._seqs, seq.rank, key=_rank)
        if at == len(self._seqs) or self._seqs[at] is not seq:
            raise ValueError(f"sequence {seq.handle} is not waiting")
        del self._seqs[at]
        self.num_tokens -= len(seq.ids)

    def ended(self, seq: Sequence) -> None:
        pass

    def longest(self) -> int:
        return 0

    def room(self, owner: str, num_ids: int, num_seqs: int, num_tokens: int) -> list[Sequence]:
        return []
