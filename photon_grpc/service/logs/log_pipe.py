"""stderr of every process of the service, behind a pipe: who writes never waits for who reads.

The supervisor makes the pipe and copies what comes out of it to its stderr. Its children have the other end as their
stderr, so that what is written there by libraries, and last by one that crashes, takes the same way. The pipe is the
queue: what does not fit is dropped.
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

from photon_grpc.service.logs.log_lines import ForeignLines, formatter
from photon_grpc.service.logs.log_sieve import LogSieve

#: As much as a process may ask for without privileges.
_PIPE_BYTES = 1024 * 1024
_READ_BYTES = 64 * 1024
#: Time for the last lines to reach a slow stderr.
_FLUSH_S = 1.0


def log_to_stderr(level: str, process: str = "", *, log_format: str = "text", fd: int = 2) -> None:
    """Set up logging of this process to what it has as stderr; `process` is its name, empty for the supervisor."""
    lines = LogLines(fd)
    lines.setFormatter(formatter(log_format, process))
    logging.basicConfig(level=level.upper(), handlers=[lines], force=True)


def log_bare_lines(logger: str, *, log_format: str = "text", fd: int = 2) -> None:
    """Write the lines of this logger whatever the level of the others; as text they are as they come, without time and
    process."""
    lines = logging.getLogger(logger)
    lines.setLevel(logging.INFO)
    if log_format == "text":
        lines.handlers = [LogLines(fd)]
        lines.propagate = False


class LogPipe:
    """The pipe, and the thread that empties it until the last writer is gone."""

    def __init__(self, target: int, log_format: str = "text") -> None:
        """`target` gets the text; -1: it is dropped. In JSON, lines that are none become it."""
        reader, self.fd = os.pipe()
        # Of the writers' end alone, but in every process: the flag belongs to the pipe, not to its descriptors.
        os.set_blocking(self.fd, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        translate = ForeignLines().translate if log_format == "json" else bytes
        self._pump = threading.Thread(target=_pump, args=(reader, target, translate), name="log", daemon=True)
        self._pump.start()

    def close(self) -> None:
        """For the last writer. Waits for what is in the pipe, but not for long."""
        os.close(self.fd)
        self._pump.join(_FLUSH_S)


class LogLines(logging.Handler):
    """Writes records to a file descriptor that may be full: what it drops it counts, and says so with the next record
    that fits."""

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
            # It will never be read, and there is no other place to say so.
            return True
        return True


class PipeStream(io.TextIOBase):
    """Drawings on the terminal behind the pipe, if that is one; what does not fit is not drawn."""

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
    """Return the descriptor of this process's stderr; -1 where it was started without."""
    return sys.__stderr__.fileno() if sys.__stderr__ is not None else -1


def _loss(num_lines: int) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, "", 0, "%d lines were dropped", (num_lines,), None)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield a pipe takes so much whole or not at all, and nothing of another process in between."""
    while len(data) > select.PIPE_BUF:
        end = data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
        yield data[:end]
        data = data[end:]
    yield data


def _pump(reader: int, target: int, translate: Callable[[bytes], bytes]) -> None:
    sieve = LogSieve()
    while data := os.read(reader, _READ_BYTES):
        # For `translate` no data are the end.
        if passed := sieve.passed(data):
            _write_all(target, memoryview(translate(passed)))
    _write_all(target, memoryview(translate(sieve.rest()) + translate(b"")))
    os.close(reader)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select((), (fd,), ())
        except OSError:
            # A terminal or a reader that is gone, a full disk: the text is lost, the pipe must not fill up.
            return
