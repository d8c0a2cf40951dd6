"""The lines of a step trace by `serve --step-trace FILE`, read one at a time: it may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from photon_grpc.errors import ConfigError

VERSION = 1

Line = dict[str, Any]
#: First and last step.
Steps = tuple[int, int]
ALL_STEPS: Steps = (0, 2**63)

#: Keys of the line of a step, and of a line without a step.
_STEP = frozenset(
    ("step", "start_s", "duration_s", "prefill_tokens", "decode_tokens", "prefill", "decode", "seated")
    + ("ended", "preempted", "blocks", "queued")
)
_REST = frozenset(("after_step", "ended", "preempted", "blocks", "queued"))


def read_trace(path: Path, steps: Steps) -> tuple[Line, Iterator[Line]]:
    """Return the head of the last start in the file, and the lines of these steps. Raise ConfigError.

    An unreadable line is returned as {"dropped": 1}.
    """
    head, begins = _last_head(path)
    if head.get("version") != VERSION:
        raise ConfigError(f"{path} is not a step trace of version {VERSION}: `serve --step-trace FILE` writes one")
    if not any("step" in line for line in _lines(path, begins, steps)):
        interval = "" if steps == ALL_STEPS else f" from {steps[0]} to {steps[1]}"
        raise ConfigError(f"{path} has no steps{interval} since the server's last start")
    return head, _lines(path, begins, steps)


def _last_head(path: Path) -> tuple[Line, int]:
    """Return the last head in the file, and the position of the lines after it."""
    head: Line = {}
    begins = position = 0
    with path.open("rb") as file:
        for data in file:
            position += len(data)
            # A new start of the server, or the next file of the same one.
            if data.startswith(b'{"trace"') and (line := _parsed(data)).get("trace") == "photon-grpc":
                head, begins = line, position
    return head, begins


def _lines(path: Path, begins: int, steps: Steps) -> Iterator[Line]:
    with path.open("rb") as file:
        file.seek(begins)
        for line in map(_parsed, file):
            number = _number(line)
            if number is None:
                yield {"dropped": 1}
            elif steps[0] <= number <= steps[1]:
                yield line


def _parsed(data: bytes) -> Line:
    """Parse a line; return {} if it was cut, or written by another program."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _number(line: Line) -> int | None:
    number = line["step"] if line.keys() >= _STEP else line["after_step"] if line.keys() >= _REST else None
    return number if isinstance(number, int) else None
