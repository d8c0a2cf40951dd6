"""Allocation of a sequence's blocks, as it grows or at once as one run (`contiguous.py`)."""

from __future__ import annotations

from typing import Protocol

from photon_grpc.core.sequence import Sequence


class FreeBlocks:
    """The free block ids, as a stack."""

    def __init__(self, num_blocks: int) -> None:
        self._stack = list(range(num_blocks, 0, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def put(self, block: int) -> None:
        self._stack.append(block)

    def take(self, count: int) -> list[int]:
        """Remove and return `count` ids. Raise IndexError if there are fewer."""
        if count > len(self._stack):
            raise IndexError(count)
        return [self._stack.pop() for _ in range(count)]


class AllocationPolicy(Protocol):
    """The amount reserved at admission, and the store of free blocks for it."""

    #: Whether tables may share blocks; impossible if each must be one run.
    may_share: bool

    def store(self, num_blocks: int) -> FreeBlocks: ...

    def tokens_at_admission(self, seq: Sequence) -> int: ...

    def headroom(self, num_running: int) -> int:
        """Return the blocks to leave free at an admission, so that running sequences do not preempt the new one."""


class GrowOnDemand:
    """Allocates blocks for the ids known at admission, and more as tokens are generated."""

    may_share = True

    def store(self, num_blocks: int) -> FreeBlocks:
        return FreeBlocks(num_blocks)

    def tokens_at_admission(self, seq: Sequence) -> int:
        return len(seq.ids)

    def headroom(self, num_running: int) -> int:
        return num_running
