"""Numbers in schemas as the compiler reads them: floats of 64 bits, each a product of digits and a power of ten that
are rounded before.

Up to 15 digits and powers up to 22 it is the float that everyone reads; else it may be the next one.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

#: Digits that a float keeps, and the largest power of ten that one is equal to.
MAX_DIGITS, _MAX_POWER = 15, 22
#: May be read as another one.
_MAY_BE_ROUNDED = re.compile(r"[\d.]{16}|\d[eE][-+]?\d\d")


class Spelled(float):
    """A number of a schema with its digits, of which a float knows 17."""

    text: str

    def __new__(cls, text: str) -> Spelled:
        self = super().__new__(cls, text)
        self.text = text
        return self


def load(schema: str) -> Any:
    """The schema with its numbers as they are spelled. Raise ValueError, RecursionError."""
    return json.loads(schema, parse_float=Spelled)


def may_be_rounded(schemas: str) -> bool:
    """Return whether it is worth looking for such a number in a JSON text that holds schemas."""
    return _MAY_BE_ROUNDED.search(schemas) is not None


def decimal(number: float) -> Decimal:
    """The number that the caller wrote."""
    return Decimal(number.text if isinstance(number, Spelled) else repr(number))


def is_plain(number: Decimal) -> bool:
    """Return whether the compiler reads and writes it as everyone does. Of more digits it may write others for the same
    float."""
    _, digits, exponent = number.as_tuple()
    return len(digits) <= MAX_DIGITS and isinstance(exponent, int) and -_MAX_POWER <= exponent <= _MAX_POWER


def is_kept(number: float) -> bool:
    """Return whether the compiler reads the float that everyone reads."""
    return is_plain(decimal(number)) or as_read(Decimal(repr(float(number)))) == number


def as_read(number: Decimal) -> float:
    """The float that the compiler makes of a number of at most 19 digits."""
    sign, digits, exponent = number.normalize().as_tuple()
    if not isinstance(exponent, int):
        return float(number)
    magnitude = float(int("".join(map(str, digits))))
    magnitude = magnitude * float(f"1e{exponent}") if exponent >= 0 else magnitude / float(f"1e{-exponent}")
    return -magnitude if sign else magnitude
