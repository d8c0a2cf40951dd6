"""Splits long prompts over steps, or does not, by `--enable-chunked-prefill`."""

from __future__ import annotations

from typing import Protocol


class Chunking(Protocol):
    def share(self, count: int, budget: int, is_alone: bool) -> int:
        """Return how many of `count` tokens to compute now, where `count` exceeds `budget`; 0 waits for a later step.

        Args:
            is_alone: the step has no other row yet.
        """


class Chunked:
    """Computes as much as fits, and the rest in later steps beside decode rows."""

    def share(self, count: int, budget: int, is_alone: bool) -> int:
        return budget


class Unchunked:
    """Computes each prompt in one step; one that exceeds the budget waits for a step without other rows."""

    def share(self, count: int, budget: int, is_alone: bool) -> int:
        return count if is_alone else 0
