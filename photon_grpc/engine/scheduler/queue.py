"""Those that wait for a seat, best rank first."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from photon_grpc.core.sequence import Rank, Sequence


def _rank(seq: Sequence) -> Rank:
    return seq.rank


def _is_unserved(seq: Sequence) -> bool:
    return seq.first_scheduled_s is None and seq.leader is None


class WaitingQueue(Protocol):
    """Bounded by its owner. Hears of every sequence from its first wait to its end."""

    #: Ids of those that wait.
    num_tokens: int

    def __len__(self) -> int: ...

    def push(self, seq: Sequence) -> None:
        """It waits: for the first time, or again after a preemption."""

    def first(self) -> Sequence:
        """Return the next to be seated."""

    def take(self, seq: Sequence) -> Rank:
        """Return the first has been seated. Returns its rank among those that run."""

    def remove(self, seq: Sequence) -> None:
        """It ends while it waits. Raises ValueError when it does not wait here."""

    def ended(self, seq: Sequence) -> None:
        """It has ended, wherever it was."""

    def longest(self) -> int:
        """Sequences that wait of the owner with most of them; 0 where owners are not told apart."""

    def room(self, owner: str, num_ids: int, num_seqs: int, num_tokens: int) -> list[Sequence]:
        """Those to give their places in a full queue to a new sequence of `owner` with `num_ids` ids, so that at least
        `num_seqs` sequences and `num_tokens` ids less wait; empty: the new one is refused."""


class RankedQueue:
    """Sorted by rank, which is unique: (the policy's number, arrival order). Knows no owners."""

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
        """Return the last of those of whose request nothing was computed, `but` these."""
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
