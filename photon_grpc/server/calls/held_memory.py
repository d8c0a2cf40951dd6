"""The memory that this process holds above what it had at rest.

gRPC gathers a message that is not complete where Python does not see it: a stream of requests that is listened to may
hold one of the largest that are let in, and silence looks the same. What the C library has given out tells of all of
them, in 0.1 ms; freed memory that the process keeps is not in it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    )


class HeldMemory:
    """At rest when it is made."""

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        """`count`: bytes that are in use."""
        self._count = count or _counter()
        self._bytes_at_rest = self._count()

    def num_bytes(self) -> int:
        return max(0, self._count() - self._bytes_at_rest)


def give_back_freed() -> None:
    """To the system: what was freed in pieces stays in the process. Takes some 10 ms for 100 MiB; for a thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _counter() -> Callable[[], int]:
    """Bytes that are in use; always 0 with a C library that does not tell."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if tell is None:
        return lambda: 0
    tell.restype = _Mallinfo2

    def count() -> int:
        told = tell()
        return int(told.uordblks + told.hblkhd)

    return count
