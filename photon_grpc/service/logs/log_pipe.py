"""The pipe that is the stderr of every process of the service, so that no writer waits for a reader.

The supervisor makes the pipe and copies its contents to its own stderr. Its children have the other end as their
stderr, so that the output of libraries and of a crash goes through it, too. The pipe is the queue: lines that do not
fit are dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator

from photon_grpc.service.logs.log_filter import LogFilter
from photon_grpc.service.logs.log_lines import ForeignLines, formatter

#: The largest pipe that a process may request without privileges.
_PIPE_BYTES = 1024 * 1024
_READ_BYTES = 64 * 1024
#: Time for the last lines to reach a slow stderr.
_FLUSH_S = 1.0


def log_to_stderr(level: str, process: str = "", *, log_format: str = "text", fd: int = 2) -> None:
    """Log to this process's stderr; `process` is its name, "" for the supervisor."""
    lines = LogLines(fd)
    lines.setFormatter(formatter(log_format, process))
    logging.basicConfig(level=level.upper(), handlers=[lines], force=True)


def log_bare_lines(logger: str, *, log_format: str = "text", fd: int = 2) -> None:
    """Write the lines of this logger at any log level; as text without time and process."""
    lines = logging.getLogger(logger)
    lines.setLevel(logging.INFO)
    if log_format == "text":
        lines.handlers = [LogLines(fd)]
        lines.propagate = False


class LogPipe:
    """The pipe, and the thread that empties it until the last writer is gone."""

    def __init__(self, target: int, log_format: str = "text") -> None:
        """Make the pipe; the file descriptor `target` gets the text, -1 drops it. With "json" all lines become JSON."""
        reader, self.fd = os.pipe()
        # For the writers' end only, but in every process: the flag belongs to the pipe, not to its descriptors.
        os.set_blocking(self.fd, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        translate = ForeignLines().translate if log_format == "json" else bytes
        self._pump = threading.Thread(target=_pump, args=(reader, target, translate), name="log", daemon=True)
        self._pump.start()

    def close(self) -> None:
        """Close the pipe after the last writer; wait up to a second until it is empty."""
        os.close(self.fd)
        self._pump.join(_FLUSH_S)


class LogLines(logging.Handler):
    """A handler for a file descriptor that may be full; it reports dropped lines before the next line that fits."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self._num_dropped and self._wrote(self.format(_loss(self._num_dropped))):
            self._num_dropped = 0
        if self._num_dropped or not self._wrote(text):
            self._num_dropped += 1

    def _wrote(self, text: str) -> bool:
        try:
            for piece in _pieces(f"{text}\n".encode(errors="backslashreplace")):
                os.write(self._fd, piece)
        except BlockingIOError:
            return False
        except OSError:
            # Nobody will read it, and there is no other place to report that.
            return True
        return True


class PipeStream(io.TextIOBase):
    """A text stream into the pipe, a terminal if the end of the pipe is one; text that does not fit is dropped."""

    def __init__(self, fd: int, log_format: str = "text") -> None:
        self._fd = fd
        self._is_terminal = log_format == "text" and os.isatty(own_stderr())

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            for piece in _pieces(text.encode(errors="backslashreplace")):
                os.write(self._fd, piece)
        return len(text)


def own_stderr() -> int:
    """Return the descriptor of this process's stderr; -1 if it was started without one."""
    return sys.__stderr__.fileno() if sys.__stderr__ is not None else -1


def _loss(num_lines: int) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, "", 0, "%d lines were dropped", (num_lines,), None)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield pieces that a pipe takes whole or not at all, so that no other process writes in between."""
    while len(data) > select.PIPE_BUF:
        end = data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
        yield data[:end]
        data = data[end:]
    yield data


def _pump(reader: int, target: int, translate: Callable[[bytes], bytes]) -> None:
    log_filter = LogFilter()
    while data := os.read(reader, _READ_BYTES):
        # No data would mean the end to `translate`.
        if passed := log_filter.passed(data):
            _write_all(target, memoryview(translate(passed)))
    _write_all(target, memoryview(translate(log_filter.rest()) + translate(b"")))
    os.close(reader)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select((), (fd,), ())
        except OSError:
            # The terminal or reader is gone or the disk full: drop the text, since the pipe must not fill up.
            return
