"""Reads JSON files that a stranger wrote: bounded in size, typed key by key, every refusal naming the key and the
file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from photon_grpc.errors import ModelLoadError

MAX_JSON_BYTES = 64 * 2**20


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of the regular file `path`. Raise ModelLoadError where it is missing, unreadable or over `limit`
    bytes."""
    try:
        if not path.is_file():  # a pipe would block the open
            raise ModelLoadError(f"{path.name}: there is no such file in {path.parent}")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ModelLoadError(f"{path.name}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ModelLoadError(f"{path.name}: cannot be read ({error})") from None
    if len(content) > limit:
        raise ModelLoadError(f"{path.name}: is larger than {limit} bytes", limit=limit)
    return content


def parse_object(content: bytes, file: str) -> dict[str, Any]:
    """The JSON object in `content`; `file` names it in the ModelLoadError."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{file}: is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object, holds {shown(value)}")
    return value


def shown(value: object) -> str:
    """`value` for a message: short, whatever a file contains."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


class JsonFields:
    """One JSON object of `file`, read key by key. A key that is absent or null gives the default; none given, it must
    be there."""

    def __init__(self, values: dict[str, Any], file: str, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file}: {self.prefix}{key} {problem}", field=self.prefix + key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, is {shown(value)}")
        if not low <= value <= high:
            raise self.error(key, f"must lie between {low} and {high}, is {shown(value)}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"must be a number, is {shown(value)}")
        if not low <= value <= high:
            raise self.error(key, f"must lie between {low:g} and {high:g}, is {shown(value)}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        return self.number(key, low, high) if self.has(key) else None

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, is {shown(value)}")
        return value

    def object(self, key: str) -> JsonFields:
        """The object under `key`; empty where it is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {shown(value)}")
        return JsonFields(value, self.file, f"{self.prefix}{key}.")

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them, in order, without doubles; empty where it is absent."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise self.error(key, f"must be a token id or a list of them, holds {shown(token)}")
            if not 0 <= token < vocab_size:
                raise self.error(key, f"must lie between 0 and {vocab_size - 1}, holds {shown(token)}")
        return tuple(dict.fromkeys(ids))

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "is missing")
        return default
