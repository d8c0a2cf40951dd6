"""Signs of life of a child process, in a page of memory that it shares with its supervisor.

The loop that does the child's work writes them itself, each with the silence that it allows itself: a thread beside it would go on while the
loop hangs. Nothing is sent, so a beat costs less than a microsecond and never waits.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

#: How many beats, seconds allowed until the next, tokens being computed meanwhile. In the machine's own layout: a number is stored at once.
_BEAT = struct.Struct("@QdQ")

#: How often a Watchdog is to be asked.
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
    """Nobody watches."""

    def beat(self, allowance_s: float, num_tokens: int = 0) -> None:
        pass


class Watchdog:
    """The supervisor's end, over a page of its own."""

    def __init__(self) -> None:
        self.fd = _shared_file()
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, _BEAT.size)
        self._count = 0
        self._silent_ticks = 0

    def tick(self) -> str:
        """To be called every TICK_S. What to say of a child that is silent for longer than it allowed itself, else nothing.

        Silence is counted in ticks, not by a clock: where the whole container was paused, the supervisor was as well. One that is still
        there after it was said is told of again as much later.
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


def _shared_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("heartbeat", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd
