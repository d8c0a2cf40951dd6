"""Those that wait for a seat, best rank first."""

from __future__ import annotations

from bisect import bisect_left, insort

from photon_grpc.core.sequence import Sequence


def _rank(seq: Sequence) -> tuple[float, int]:
    return seq.rank


class WaitingQueue:
    """Sorted by rank, which is unique: (the policy's number, arrival order). Bounded by its owner."""

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

    def remove(self, seq: Sequence) -> None:
        """Raise ValueError when it is not here."""
        at = bisect_left(self._seqs, seq.rank, key=_rank)
        if at == len(self._seqs) or self._seqs[at] is not seq:
            raise ValueError(f"sequence {seq.handle} is not waiting")
        del self._seqs[at]
        self.num_tokens -= len(seq.ids)
