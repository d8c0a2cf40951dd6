"""Untrusted JSON files, read as typed structs within a bound on their size.

Every error names the file, the key, its value and the allowed values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from photon_grpc.errors import ModelLoadError

MAX_JSON_BYTES = 64 * 2**20

T = TypeVar("T", bound=msgspec.Struct)


def no_file(path: Path) -> ModelLoadError:
    """Return the error for a path that is no regular file, whatever it is."""
    if path.exists():
        return ModelLoadError(f"{path.name}: is {'a directory' if path.is_dir() else 'a pipe or a device'}, not a file")
    return ModelLoadError(f"{path.name}: there is no such file in {path.parent}")


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file. Raise ModelLoadError if it is missing, unreadable or over `limit` bytes."""
    try:
        if not path.is_file():  # a pipe would block the open
            raise no_file(path)
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ModelLoadError(f"{path.name}: cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise ModelLoadError(f"{path.name}: exceeds the limit of {limit} bytes", limit=limit)
    return content


def parse_object(content: bytes, file: str) -> dict[str, Any]:
    """Return the JSON object in `content`; `file` names it in the ModelLoadError."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{file}: is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object, holds {shown(value)}")
    return value


def as_struct(values: dict[str, Any], kind: type[T], file: str) -> T:
    """Convert `values` to a `kind`, ignoring unknown keys.

    Raise ModelLoadError for a value of a wrong type or out of its bounds, and for null where the type is without None.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _refusal(file, values, str(error)) from None


def refusal(file: str, key: str, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{file}: {key} {problem}", field=key)


def shown(value: object, limit: int = 60) -> str:
    """Return a short text of the value for a message."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _refusal(file: str, values: Any, message: str) -> ModelLoadError:
    """Add the value to a message of msgspec such as "Expected `int` >= 1 - at `$.rope.factors[3]`"."""
    problem, _, path = message.replace("`", "").partition(" - at $.")
    if missing := re.fullmatch("Object missing required field (.+)", problem):
        return refusal(file, f"{path}.{missing[1]}".lstrip("."), "is missing")
    for part in re.findall(r"\w+", path):
        values = values[int(part) if isinstance(values, list) else part]
    said = "null" if values is None else shown(values)
    return refusal(file, path, f"is {said}: {problem.replace('Expected', 'expected', 1)}")
