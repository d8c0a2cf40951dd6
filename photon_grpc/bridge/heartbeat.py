"""Signs of life of a child process, in a page of memory that it shares with its supervisor.

The child's own loop writes them, each with the silence that it allows itself: a thread beside it would go on while the
loop hangs. Nothing is sent, so a beat costs less than a microsecond and never waits.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

#: Count of beats, seconds allowed until the next, tokens computed meanwhile. Native layout: a number is stored at once.
_BEAT = struct.Struct("@QdQ")

#: Interval of `Watchdog.tick`.
TICK_S = 0.25


class SharedHeartbeat:
    """The child's end, over the file descriptor it was given."""

    def __init__(self, fd: int) -> None:
        page = memoryview(mmap.mmap(fd, _BEAT.size))
        os.close(fd)
        self._whole, self._real = page.cast("Q"), page.cast("d")
        self._count = 0

    def beat(self, allowance_s: float, num_tokens: int = 0) -> None:
        """As core.ports.Heartbeat. With the first one, the supervisor begins to watch."""
        self._count += 1
        self._real[1] = allowance_s
        self._whole[2] = num_tokens
        # Last: with a new count the rest is read, whenever this thread is interrupted.
        self._whole[0] = self._count


class NoHeartbeat:
    """For a loop without a supervisor."""

    def beat(self, allowance_s: float, num_tokens: int = 0) -> None:
        pass


class Watchdog:
    """The supervisor's end, over a page of its own."""

    def __init__(self) -> None:
        self.fd = shared_file("heartbeat")
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, _BEAT.size)
        self._count = 0
        self._silent_ticks = 0

    def tick(self) -> str:
        """Call every TICK_S. Return a complaint about a child silent for longer than it allowed itself, else "".

        Silence is counted in ticks, not by a clock: a pause of the whole container pauses the supervisor as well.
        A child that stays silent is complained of again after as much silence.
        """
        count, allowance_s, num_tokens = _BEAT.unpack_from(self._page)
        if count != self._count:
            self._count, self._silent_ticks = count, 0
        elif count:
            self._silent_ticks += 1
        silent_s = self._silent_ticks * TICK_S
        if silent_s <= allowance_s:
            return ""
        self._silent_ticks = 0
        what = f"in steps of {num_tokens} tokens" if num_tokens else "between steps"
        return f"has made no progress for {silent_s:.1f} s {what}, {allowance_s:.1f} s were allowed"

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._page.close()
            os.close(self.fd)
            self.fd = -1


def shared_file(name: str) -> int:
    """Return a file without a place in any directory: memory that processes share by its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd
