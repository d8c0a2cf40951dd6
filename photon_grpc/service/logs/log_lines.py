"""Records of the log as lines: for people, or each a JSON object for what collects logs."""

from __future__ import annotations

import io
import json
import logging
import math
from datetime import UTC, datetime
from typing import Any, TextIO

#: As much as a pipe takes whole: no other process's text stands in the middle of a line.
_MAX_JSON_BYTES = 4095
#: Beyond it a line without an end is one.
_MAX_FOREIGN_CHARS = 3000
_BEGIN = '{"time": '


def formatter(log_format: str, process: str = "") -> logging.Formatter:
    """For `log_format`, as --log-format takes it; `process` is its name, empty for the supervisor."""
    return JsonLines(process) if log_format == "json" else TextLines(process)


class TextLines(logging.Formatter):
    """`12:34:56 message`, the level where it is not information, the process where it is not the supervisor."""

    def __init__(self, process: str = "") -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._process = f"{process}: " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = f"{self.formatTime(record, self.datefmt)} {level}{self._process}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonLines(logging.Formatter):
    """`{"time": …, "level": …, "process": …, "message": …}`, or the record's own `fields` in the message's place."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process or "supervisor"

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        frames = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        level = record.levelname.lower()
        return _line({"time": _utc(record.created), "level": level, "process": self._process, **told, **frames})


class JsonStream(io.TextIOBase):
    """A text stream whose lines become JSON objects; of progress that is drawn over itself the last state remains."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if told := line.rpartition("\r")[2].strip():
                self._stream.write(f"{foreign_line(told)}\n")
        self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


class ForeignLines:
    """Bytes of many writers: lines that are JSON pass, those that libraries and dying processes write become it."""

    def __init__(self) -> None:
        self._rest = b""

    def translate(self, data: bytes) -> bytes:
        """Return the lines that are complete; "" ends what was begun."""
        *lines, self._rest = (self._rest + (data or b"\n")).split(b"\n")
        if len(self._rest) > _MAX_JSON_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return b"".join(self._translated(line) for line in lines if line.strip())

    def _translated(self, line: bytes) -> bytes:
        is_ours = line.startswith(_BEGIN.encode()) and line.endswith(b"}")
        return (line if is_ours else foreign_line(line.decode(errors="replace")).encode()) + b"\n"


def foreign_line(text: str) -> str:
    """Make JSON of a line that did not come through the log; its process is unknown."""
    time = _utc(datetime.now(UTC).timestamp())
    return _line({"time": time, "level": "warning", "process": None, "message": text[:_MAX_FOREIGN_CHARS]})


def _line(told: dict[str, Any]) -> str:
    """One JSON object; where it is too long, its longest texts lose their beginnings."""
    while (excess := _num_bytes(told) - _MAX_JSON_BYTES) > 0:
        longest = max((name for name in told if isinstance(told[name], str)), key=lambda name: _num_bytes(told[name]))
        text = told[longest]
        # Escapes take up to six bytes a character.
        told[longest] = "…" + text[math.ceil(excess * len(text) / _num_bytes(text)) + 2 :]
    return _json(told)


def _json(value: Any) -> str:
    """Half of a surrogate pair, which cannot be encoded, stays an escape."""
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace").decode()


def _num_bytes(value: Any) -> int:
    return len(_json(value).encode())


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
