"""Allocation of a sequence's blocks: as it grows, or all at once as one run (`contiguous.py`)."""

from __future__ import annotations

from typing import Protocol

from photon_grpc.core.sequence import Sequence


class FreeBlocks:
    """The free ids: a stack for single blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._stack = list(range(num_blocks, 0, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def put(self, block: int) -> None:
        self._stack.append(block)

    def take(self, count: int) -> list[int]:
        """Raise IndexError when there are fewer."""
        if count > len(self._stack):
            raise IndexError(count)
        return [self._stack.pop() for _ in range(count)]


class AllocationPolicy(Protocol):
    """The amount reserved at admission, and its store."""

    #: Whether tables may hold blocks of others: no where they must be one run.
    may_share: bool

    def store(self, num_blocks: int) -> FreeBlocks: ...

    def tokens_at_admission(self, seq: Sequence) -> int: ...

    def headroom(self, num_running: int) -> int:
        """Blocks to leave free at an admission, so that the running ones do not preempt the newcomer at once."""


class GrowOnDemand:
    """Blocks for the ids known at admission; more as tokens are generated."""

    may_share = True

    def store(self, num_blocks: int) -> FreeBlocks:
        return FreeBlocks(num_blocks)

    def tokens_at_admission(self, seq: Sequence) -> int:
        return len(seq.ids)

    def headroom(self, num_running: int) -> int:
        return num_running
