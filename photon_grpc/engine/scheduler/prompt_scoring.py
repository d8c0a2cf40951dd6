"""Prompt positions that still need log-probabilities.

A prompt is scored once, for the first output of its request, while it is computed. The next position to score is kept
here, so that each chunk continues after the previous one and a resumed prefill scores nothing twice.
"""

from __future__ import annotations

import sys

from photon_grpc.core.sequence import Sequence

_UNLIMITED = sys.maxsize


class PendingPromptLogprobs:
    """The sequences whose prompt is not fully scored, from `begin` to the last position or `forget`."""

    def __init__(self) -> None:
        #: Sequence -> the first position that no launched step scores.
        self.unscored: dict[Sequence, int] = {}

    def begin(self, seq: Sequence) -> None:
        """Add the first output of a request. Scoring starts at the second id, since nothing precedes the first."""
        if seq.request.logprobs.num_prompt_records and seq.num_prompt > 1:
            self.unscored[seq] = 1

    def forget(self, seq: Sequence) -> None:
        self.unscored.pop(seq, None)

    def max_cached(self, seq: Sequence) -> int:
        """Return the most tokens to take from the prefix cache: scoring needs the logits of the position before."""
        return self.unscored.get(seq, _UNLIMITED) - 1

    def take_rows(self, rows: list[Sequence]) -> tuple[tuple[int, int], ...]:
        """Return `Batch.prompt_logprob_rows` for the rows of a launched batch; call once per batch."""
        taken = []
        for row, seq in enumerate(rows):
            first = self.unscored.get(seq)
            if first is None:
                continue
            end = seq.num_computed + sum(flight.computes for flight in seq.flights)
            if first <= end:
                taken.append((row, first))
                self.unscored[seq] = end + 1
                if end >= seq.num_prompt - 1:
                    del self.unscored[seq]
        return tuple(taken)
