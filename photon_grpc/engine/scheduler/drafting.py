"""Chooses how many tokens a step drafts for every decode row. One object per way of drafting."""

from __future__ import annotations

from typing import Protocol


class Drafting(Protocol):
    def num_drafts(self, num_running: int) -> int:
        """k of the step being planned: each decode row computes its last token and up to k drafts of the runner.

        Args:
            num_running: sequences that have a seat: what drafts cost grows with the load.
        """


class NoDrafting:
    """Every decode row computes one token."""

    def num_drafts(self, num_running: int) -> int:
        return 0
