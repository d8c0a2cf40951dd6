"""Names of enum values, of which a newer server may send more than this client knows."""

from __future__ import annotations

from typing import Any


def enum_name(kind: Any, number: int, prefix: str) -> str:
    """Return the name of a value without `prefix`, or the number if it has no name here."""
    return str(kind.Name(number)).removeprefix(prefix) if number in kind.values() else str(int(number))
