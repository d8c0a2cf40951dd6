"""Chooses how many tokens a step drafts for every decode row."""

from __future__ import annotations

from typing import Protocol


class Drafting(Protocol):
    def num_drafts(self, num_running: int) -> int:
        """Return k for the step being planned: each decode row computes its last token and up to k drafts.

        Args:
            num_running: sequences with a slot, since the cost of drafts grows with the load.
        """


class NoDrafting:
    """Every decode row computes one token."""

    def num_drafts(self, num_running: int) -> int:
        return 0
