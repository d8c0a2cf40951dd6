"""Integers in schemas that the compiler would round: it reads numbers as floats of 64 bits."""

from __future__ import annotations

import json
import re
from typing import Any

from photon_grpc.frontend.schema_nodes import schemas_of

#: The smallest that may be rounded has 16 digits.
_MAY_BE = re.compile(r"\d{16}")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def may_hold_rounded(schemas: str) -> bool:
    """Return whether it is worth looking for one in a JSON text that holds schemas."""
    return _MAY_BE.search(schemas) is not None


def rounded_integer(schema: str) -> int | None:
    """A constant or a bound of this schema, a JSON text, that no float is equal to; None where there is none."""
    if not may_hold_rounded(schema):
        return None
    try:
        root = json.loads(schema)
    except (ValueError, RecursionError):  # the compiler says what is wrong with it
        return None
    for node in schemas_of(root):
        found = _first([node[keyword] for keyword in ("const", "enum", *_BOUNDS) if keyword in node])
        if found is not None:
            return found
    return None


def _first(waiting: list[Any]) -> int | None:
    while waiting:
        value = waiting.pop()
        if isinstance(value, int) and _is_rounded(value):
            return value
        if isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value
    return None


def _is_rounded(value: int) -> bool:
    try:
        return int(float(value)) != value
    except OverflowError:
        return True
