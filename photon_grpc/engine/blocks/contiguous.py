"""Contiguous KV: the whole context is reserved at admission as one run of ordinary blocks."""

from __future__ import annotations

from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.allocation import FreeBlocks


class FreeRuns(FreeBlocks):
    """The free block ids, as a map that is searched for the first run that is long enough."""

    def __init__(self, num_blocks: int) -> None:
        # One byte per block, indexed by id, so that bytearray.find searches for runs at memory speed.
        self._free = bytearray(b"\x00" + b"\x01" * num_blocks)
        self._count = num_blocks

    def __len__(self) -> int:
        return self._count

    def put(self, block: int) -> None:
        self._free[block] = 1
        self._count += 1

    def take(self, count: int) -> list[int]:
        """Remove and return `count` consecutive ids. Raise IndexError if no run is long enough."""
        start = self._free.find(b"\x01" * count)
        if start < 0:
            raise IndexError(count)
        self._free[start : start + count] = bytes(count)
        self._count -= count
        return list(range(start, start + count))


class ReserveContext:
    """Reserves one run for all tokens of a sequence. Nothing is shared, since a shared block would break the run."""

    may_share = False

    def store(self, num_blocks: int) -> FreeBlocks:
        return FreeRuns(num_blocks)

    def tokens_at_admission(self, seq: Sequence) -> int:
        # The keys and values of the last sampled token are never written.
        return seq.max_len - 1

    def headroom(self, num_running: int) -> int:
        return 0
