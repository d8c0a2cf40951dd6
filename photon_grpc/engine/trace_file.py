"""A file of JSON lines that delays nothing: written by a thread, bounded in memory and on disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from photon_grpc.errors import ConfigError

_LOG = logging.getLogger(__name__)

#: Most lines that wait to be written.
_MAX_WAITING = 1024
#: Most bytes of the file; the previous one is kept as FILE.1.
MAX_BYTES = 64 * 1024 * 1024
_CLOSING_S = 2.0
#: Shortest time between two warnings about a failing disk.
_COMPLAINT_INTERVAL_S = 60.0

#: A function that makes the line, and its arguments.
Record = tuple[Any, ...]


def check_trace_file(path: str) -> None:
    """Raise ConfigError if no trace can be written there; remove a file that this check created."""
    problem, file_path = "", Path(path).expanduser()
    try:
        was_there = os.path.lexists(file_path)
        file = _open(file_path)
    except OSError as error:
        problem = error.strerror or str(error)
    else:
        problem = "" if stat.S_ISREG(os.fstat(file).st_mode) else "this is not a regular file, so it cannot be rotated"
        os.close(file)
        if not was_there:
            file_path.unlink(missing_ok=True)
    if problem:
        raise ConfigError(
            f"--step-trace {path}: {problem}; name a file in a directory that this user may write", field="--step-trace"
        )


class TraceFile:
    """Appends lines. What the disk or the thread cannot take is dropped and counted as `dropped` in the next line."""

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self._path = Path(path).expanduser()
        self._max_bytes = max_bytes
        self._head: dict[str, Any] = {}
        self._waiting: queue.Queue[Record | None] = queue.Queue(_MAX_WAITING)
        #: Lines dropped by the loop, and by the thread.
        self._num_refused = self._num_unwritten = 0
        self._num_reported = 0
        self._complained_s = float("-inf")
        self._file = -1
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._write_all, name="step-trace", daemon=True)

    def begin(self, head: dict[str, Any]) -> None:
        """Start writing with `head`, which is repeated in each file after a rotation."""
        self._head = head
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a line. Never waits, never raises."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._num_refused += 1

    def close(self) -> None:
        """Write what waits, for at most two seconds."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_CLOSING_S)
            self._thread.join(_CLOSING_S)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (record := self._waiting.get()) is not None:
            make: Callable[..., dict[str, Any]] = record[0]
            line = make(*record[1:])
            num_dropped = self._num_refused + self._num_unwritten
            if num_dropped > self._num_reported:
                line["dropped"] = num_dropped - self._num_reported
            try:
                self._append(msgspec.json.encode(line) + b"\n")
                self._num_reported = num_dropped
            except OSError as error:
                self._num_unwritten += 1
                self._complain(error)
        if self._file >= 0:
            self._close_file()

    def _append(self, data: bytes) -> None:
        """Append one whole line. Raise OSError."""
        if self._file < 0:
            self._begin_file()
        elif self._num_bytes + len(data) > self._max_bytes:
            self._rotate()
        self._write(data)

    def _begin_file(self) -> None:
        self._file = _open(self._path)
        self._num_bytes = os.fstat(self._file).st_size
        try:
            self._write(msgspec.json.encode(self._head) + b"\n")
        except OSError:
            self._close_file()
            raise

    def _rotate(self) -> None:
        self._close_file()
        self._path.replace(f"{self._path}.1")
        self._begin_file()

    def _close_file(self) -> None:
        os.close(self._file)
        self._file = -1

    def _write(self, data: bytes) -> None:
        num_written = os.write(self._file, data)
        if num_written < len(data):
            # The disk is full; part of a line would corrupt the next one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._num_bytes += num_written

    def _complain(self, error: OSError) -> None:
        if time.monotonic() - self._complained_s > _COMPLAINT_INTERVAL_S:
            self._complained_s = time.monotonic()
            _LOG.warning("--step-trace: %s; lines are left out", error.strerror)


def _open(path: Path) -> int:
    """Open a file for appending, without waiting for the reader of a FIFO. Raise OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
