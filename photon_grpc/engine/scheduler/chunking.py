"""Splits long prompts over steps, or does not. One object per `--enable-chunked-prefill`."""

from __future__ import annotations

from typing import Protocol


class Chunking(Protocol):
    def share(self, count: int, budget: int, is_alone: bool) -> int:
        """Of `count` tokens, more than `budget`, those to compute now; 0: none before a later step. `is_alone`: no
        other row yet."""


class Chunked:
    """Computes as much as fits, the rest in later steps beside decoding rows."""

    def share(self, count: int, budget: int, is_alone: bool) -> int:
        return budget


class Whole:
    """All in one step: one that exceeds the budget waits for a step of its own."""

    def share(self, count: int, budget: int, is_alone: bool) -> int:
        return count if is_alone else 0
