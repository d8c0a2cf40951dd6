"""Heartbeats of a child process, in a page of memory that it shares with its supervisor.

The child's loop writes them, since a separate thread would go on while the loop hangs. Each beat says how long the next
one may take. Nothing is sent, so a beat costs less than a microsecond and never waits.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

#: Count of beats, seconds allowed until the next, tokens computed meanwhile. In native layout, writes are atomic.
_BEAT = struct.Struct("@QdQ")

#: Place of the status that `wait` returns, counted from the state of a process; 0 for those who may not read it.
_STATUS = 49

#: Interval of `Watchdog.tick`.
TICK_S = 0.25


class SharedHeartbeat:
    """The child's end, over the file descriptor that it got."""

    def __init__(self, fd: int) -> None:
        page = memoryview(mmap.mmap(fd, _BEAT.size))
        os.close(fd)
        self._whole, self._real = page.cast("Q"), page.cast("d")
        self._count = 0

    def beat(self, allowance_s: float, num_tokens: int = 0) -> None:
        """Write a beat, as in core.ports.Heartbeat. The supervisor watches from the first one on."""
        self._count += 1
        self._real[1] = allowance_s
        self._whole[2] = num_tokens
        # Written last: the supervisor reads the other numbers when the count has changed.
        self._whole[0] = self._count


class NoHeartbeat:
    """The heartbeat of a loop without a supervisor."""

    def beat(self, allowance_s: float, num_tokens: int = 0) -> None:
        pass


class Watchdog:
    """The supervisor's end, which owns the page."""

    def __init__(self) -> None:
        self.fd = shared_file("heartbeat")
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, _BEAT.size)
        self._count = 0
        self._silent_ticks = 0

    def tick(self) -> str:
        """Return a complaint if the child was silent for longer than it announced, else "". Call every TICK_S.

        Silence is counted in ticks rather than by a clock, since a pause of the whole container pauses the supervisor
        too. After a complaint the count starts again.
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
        """Free the page; idempotent."""
        if self.fd >= 0:
            self._page.close()
            os.close(self.fd)
            self.fd = -1


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process; False if it is unknown (not Linux)."""
    return _stat(pid)[:1] in ([b"T"], [b"t"])


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process whose main thread has ended, negative for a signal; None if it is unknown.

    Its parent is told only when its memory is released, which takes a tenth of a second for a large one.
    """
    stat = _stat(pid)
    is_known = len(stat) > _STATUS and stat[0] in (b"Z", b"X") and stat[_STATUS] != b"0"
    return os.waitstatus_to_exitcode(int(stat[_STATUS])) if is_known else None


def _stat(pid: int) -> list[bytes]:
    """Return what the system says of a process, from its state on; nothing if it is unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # PID (NAME) STATE ...; a name may hold anything.
            return stat.read().rpartition(b") ")[2].split()
    except OSError:
        return []


def shared_file(name: str) -> int:
    """Return an unnamed file: memory that processes share through its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd
