"""Chooses how many tokens a step drafts for every decode row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from photon_grpc.core.batch import DRAFT_COUNTS, Batch
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.step_costs import counts_with_shape


class Drafting(Protocol):
    def num_drafts(self, num_running: int, has_prompts: Callable[[], bool]) -> int:
        """Return k for the step being planned: each decode row computes its last token and up to k drafts.

        Args:
            num_running: sequences with a slot, since the cost of drafts grows with the load.
            has_prompts: says whether prompts may be computed in the step.
        """

    def computes_prompt(self, seq: Sequence, num_running: int) -> bool:
        """Return whether drafters compute the prompt of a sequence, the last of so many, for drafts behind it."""

    def of(self, seq: Sequence, k: int) -> int:
        """Return the most drafts that the runner makes for a sequence in a step with k.

        Those that its constraint leaves no choice about are given to it, up to k, whatever this is.
        """

    def kept(self, seq: Sequence, num_drafts: int, num_right: int) -> None:
        """Learn how many of a row's drafts were right, one after the other."""

    def stepped(self, batch: Batch, duration_s: float) -> None:
        """Learn that a step was read just now, and how long it took from its launch on; 0: it failed."""


class NoDrafting:
    """Every decode row computes one token."""

    def num_drafts(self, num_running: int, has_prompts: Callable[[], bool]) -> int:
        return 0

    def computes_prompt(self, seq: Sequence, num_running: int) -> bool:
        return False

    def of(self, seq: Sequence, k: int) -> int:
        return 0

    def kept(self, seq: Sequence, num_drafts: int, num_right: int) -> None:
        """Do nothing."""

    def stepped(self, batch: Batch, duration_s: float) -> None:
        """Do nothing."""


class FixedDrafting(NoDrafting):
    """Every decode row drafts as many tokens as its request allows; beside many rows as many as there is a shape for.

    Args:
        count: drafts of a row.
    """

    def __init__(self, count: int) -> None:
        self._counts = tuple(each for each in DRAFT_COUNTS if each <= count)

    def num_drafts(self, num_running: int, has_prompts: Callable[[], bool]) -> int:
        return max(counts_with_shape(num_running, self._counts), default=0)

    def computes_prompt(self, seq: Sequence, num_running: int) -> bool:
        return bool(self.num_drafts(num_running, bool))

    def of(self, seq: Sequence, k: int) -> int:
        return min(seq.request.max_drafts, k)


class ForcedDrafting(FixedDrafting):
    """Every decode row has the drafts that its constraint leaves no choice about, and no others."""

    def of(self, seq: Sequence, k: int) -> int:
        return 0
