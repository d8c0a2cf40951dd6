"""Chooses how many tokens a step drafts for every decode row."""

from __future__ import annotations

from typing import Protocol

from photon_grpc.core.sequence import Sequence


class Drafting(Protocol):
    def num_drafts(self, num_running: int) -> int:
        """Return k for the step being planned: each decode row computes its last token and up to k drafts.

        Args:
            num_running: sequences with a slot, since the cost of drafts grows with the load.
        """

    def of(self, seq: Sequence, k: int) -> int:
        """Return the most drafts of a sequence in a step with k."""


class NoDrafting:
    """Every decode row computes one token."""

    def num_drafts(self, num_running: int) -> int:
        return 0

    def of(self, seq: Sequence, k: int) -> int:
        return 0


class FixedDrafting:
    """Every decode row drafts as many tokens as it may.

    Args:
        count: drafts of a row.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def num_drafts(self, num_running: int) -> int:
        return self._count

    def of(self, seq: Sequence, k: int) -> int:
        return k
