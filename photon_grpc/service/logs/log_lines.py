"""Log records as lines of text for people, or of JSON for log collectors."""

from __future__ import annotations

import io
import json
import logging
import math
from datetime import UTC, datetime
from typing import Any, TextIO

#: A pipe takes this many bytes at once, so that no other process writes into the middle of a line.
_MAX_JSON_BYTES = 4095
#: Limit on the text that is kept of a foreign line.
_MAX_FOREIGN_CHARS = 3000
_BEGIN = '{"time": '


def formatter(log_format: str, process: str = "") -> logging.Formatter:
    """Return the formatter for a value of --log-format; `process` is "" for the supervisor."""
    return JsonLines(process) if log_format == "json" else TextLines(process)


class TextLines(logging.Formatter):
    """Lines such as `12:34:56 WARNING engine: message`, without the level INFO and the supervisor's name."""

    def __init__(self, process: str = "") -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._process = f"{process}: " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = f"{self.formatTime(record, self.datefmt)} {level}{self._process}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonLines(logging.Formatter):
    """Lines such as `{"time": …, "level": …, "process": …, "message": …}`, or with the record's `fields` as message."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process or "supervisor"

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        frames = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        level = record.levelname.lower()
        return _line({"time": _utc(record.created), "level": level, "process": self._process, **content, **frames})


class JsonStream(io.TextIOBase):
    """A text stream whose lines become JSON objects; of a progress bar the last state remains."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if last := line.rpartition("\r")[2].strip():
                self._stream.write(f"{foreign_line(last)}\n")
        self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


class ForeignLines:
    """The bytes of many writers, in which lines of libraries and of dying processes become JSON, too."""

    def __init__(self) -> None:
        self._rest = b""

    def translate(self, data: bytes) -> bytes:
        """Return the complete lines; b"" as `data` ends an incomplete one."""
        *lines, self._rest = (self._rest + (data or b"\n")).split(b"\n")
        if len(self._rest) > _MAX_JSON_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return b"".join(self._translated(line) for line in lines if line.strip())

    def _translated(self, line: bytes) -> bytes:
        is_ours = line.startswith(_BEGIN.encode()) and line.endswith(b"}")
        return (line if is_ours else foreign_line(line.decode(errors="replace")).encode()) + b"\n"


def foreign_line(text: str) -> str:
    """Return the JSON of a line from outside the log, whose process is unknown."""
    time = _utc(datetime.now(UTC).timestamp())
    return _line({"time": time, "level": "warning", "process": None, "message": text[:_MAX_FOREIGN_CHARS]})


def _line(content: dict[str, Any]) -> str:
    """Return one JSON object; if it is too long, cut the beginnings of its longest texts."""
    while (excess := _num_bytes(content) - _MAX_JSON_BYTES) > 0:
        texts = (name for name in content if isinstance(content[name], str))
        longest = max(texts, key=lambda name: _num_bytes(content[name]))
        text = content[longest]
        # Escapes take up to six bytes a character.
        content[longest] = "…" + text[math.ceil(excess * len(text) / _num_bytes(text)) + 2 :]
    return _json(content)


def _json(value: Any) -> str:
    """Encode a value; half of a surrogate pair stays an escape."""
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace").decode()


def _num_bytes(value: Any) -> int:
    return len(_json(value).encode())


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
