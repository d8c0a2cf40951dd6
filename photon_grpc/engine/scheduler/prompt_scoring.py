"""Prompt positions that are still to be scored.

A prompt is scored once, by the first output of its request, while it is computed. The position that is scored next
stands here; so a chunk goes on where the one before it ended, and a resumed prefill scores nothing again.
"""

from __future__ import annotations

import sys

from photon_grpc.core.sequence import Sequence

_UNLIMITED = sys.maxsize


class PendingPromptLogprobs:
    """The sequences whose prompt is not yet scored, from `begin` to its last position or `forget`."""

    def __init__(self) -> None:
        #: Sequence -> the first position that no launched step scores.
        self.unscored: dict[Sequence, int] = {}

    def begin(self, seq: Sequence) -> None:
        """Take the first output of a request; nothing precedes the first id, so it has no scores."""
        if seq.request.logprobs.num_prompt_records and seq.num_prompt > 1:
            self.unscored[seq] = 1

    def forget(self, seq: Sequence) -> None:
        self.unscored.pop(seq, None)

    def max_cached(self, seq: Sequence) -> int:
        """Tokens that may be found computed: the logits of the position before an unscored one are needed."""
        return self.unscored.get(seq, _UNLIMITED) - 1

    def scored(self, rows: list[Sequence]) -> tuple[tuple[int, int], ...]:
        """Return `Batch.prompt_logprob_rows` for the rows of a launched batch; call once per batch."""
        scored = []
        for row, seq in enumerate(rows):
            first = self.unscored.get(seq)
            if first is None:
                continue
            end = seq.num_computed + sum(flight.computes for flight in seq.flights)
            if first <= end:
                scored.append((row, first))
                self.unscored[seq] = end + 1
                if end >= seq.num_prompt - 1:
                    del self.unscored[seq]
        return tuple(scored)
