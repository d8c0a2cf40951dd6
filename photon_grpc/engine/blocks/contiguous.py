"""Contiguous KV: a whole context reserved at admission as one run of ordinary blocks."""

from __future__ import annotations

from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.allocation import FreeBlocks


class FreeRuns(FreeBlocks):
    """The free ids, as a map that is searched for the first run long enough."""

    def __init__(self, num_blocks: int) -> None:
        # One byte a block, index = id: bytearray.find is a run search at memory speed.
        self._free = bytearray(b"\x00" + b"\x01" * num_blocks)
        self._count = num_blocks

    def __len__(self) -> int:
        return self._count

    def put(self, block: int) -> None:
        self._free[block] = 1
        self._count += 1

    def take(self, count: int) -> list[int]:
        """`count` consecutive ids. Raise IndexError when no run is long enough."""
        start = self._free.find(b"\x01" * count)
        if start < 0:
            raise IndexError(count)
        self._free[start : start + count] = bytes(count)
        self._count -= count
        return list(range(start, start + count))


class ReserveContext:
    """One run for everything the sequence may ever hold. Nothing is shared: a shared block would break the run."""

    may_share = False

    def store(self, num_blocks: int) -> FreeBlocks:
        return FreeRuns(num_blocks)

    def tokens_at_admission(self, seq: Sequence) -> int:
        # The last token drawn is never written.
        return seq.max_len - 1

    def headroom(self, num_running: int) -> int:
        return 0
