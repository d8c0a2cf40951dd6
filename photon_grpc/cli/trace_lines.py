"""The lines of a step trace by `serve --step-trace FILE`, read one at a time: it may be larger than memory."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from photon_grpc.errors import ConfigError

VERSION = 1

Line = dict[str, Any]
#: First and last step.
Steps = tuple[int, int]
ALL_STEPS: Steps = (0, 2**63)

_ROWS = [(str, int, int)]
_SEATED = {"sequence": str, "request_id": str, "output": int, "prompt_tokens": int, "known_tokens": int}
#: What a line holds by key. A list stands for any number of its element, a tuple for a list of that length.
_FORMS: dict[str, Any] = {
    **dict.fromkeys(("start_s", "duration_s"), float),
    **dict.fromkeys(("step", "after_step", "prefill_tokens", "decode_tokens", "queued", "dropped"), int),
    "prefill": _ROWS,
    "decode": _ROWS,
    "seated": [_SEATED | {"queue_s": float}],
    "ended": [(str, str)],
    "preempted": [str],
    "blocks": dict.fromkeys(("owned", "cached", "limbo", "free"), int),
}
#: Keys of the line of a step, and of a line without a step.
_STEP = _FORMS.keys() - {"after_step", "dropped"}
_REST = frozenset(("after_step", "ended", "preempted", "blocks", "queued"))
#: Numbers from here on are no times, counts or positions.
_MAX_NUMBER = 2**53


def read_trace(path: Path, steps: Steps) -> tuple[Line, Iterator[Line]]:
    """Return the head of the last start in the file, and the lines of these steps. Raise ConfigError.

    A line that was cut, or that another program wrote, is returned as {"dropped": 1}. The iterator, too, raises
    ConfigError: for a value of a wrong form, with the number of its line.
    """
    head, begins, first = _last_head(path)
    if head.get("version") != VERSION:
        raise ConfigError(f"{path} is not a step trace of version {VERSION}: `serve --step-trace FILE` writes one")
    if not any("step" in line for line in _lines(path, begins, first, steps)):
        interval = "" if steps == ALL_STEPS else f" from {steps[0]} to {steps[1]}"
        raise ConfigError(f"{path} has no steps{interval} since the server's last start")
    return head, _lines(path, begins, first, steps)


def _last_head(path: Path) -> tuple[Line, int, int]:
    """Return the last head in the file, and the position and the number of the line after it."""
    head: Line = {}
    begins, first, position = 0, 1, 0
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            position += len(data)
            # A new start of the server, or the next file of the same one.
            if data.startswith(b'{"trace"') and (line := _parsed(data)).get("trace") == "photon-grpc":
                head, begins, first = line, position, number + 1
    return head, begins, first


def _lines(path: Path, begins: int, first: int, steps: Steps) -> Iterator[Line]:
    with path.open("rb") as file:
        file.seek(begins)
        for number, line in enumerate(map(_parsed, file), first):
            step = _step_of(line)
            if step is None:
                yield {"dropped": 1}
            elif steps[0] <= step <= steps[1]:
                _check(line, f"{path}, line {number}")
                yield line


def _check(line: Line, where: str) -> None:
    """Raise ConfigError naming the first value that has not the form of its key."""
    for key, value in line.items():
        if key in _FORMS and not _has_form(value, _FORMS[key]):
            raise ConfigError(f"{where}: {key!r} cannot be {reprlib.repr(value)}; was the step trace edited?")


def _has_form(value: Any, form: Any) -> bool:
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(each, form[0]) for each in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(_has_form, value, form))
    if isinstance(form, dict):
        return (
            isinstance(value, dict) and value.keys() >= form.keys() and all(_has_form(value[k], form[k]) for k in form)
        )
    if form is str:
        return isinstance(value, str)
    return type(value) in (int, form) and 0 <= value < _MAX_NUMBER


def _parsed(data: bytes) -> Line:
    """Parse a line; return {} if it was cut, or written by another program."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _step_of(line: Line) -> int | None:
    number = line["step"] if line.keys() >= _STEP else line["after_step"] if line.keys() >= _REST else None
    return number if isinstance(number, int) else None
