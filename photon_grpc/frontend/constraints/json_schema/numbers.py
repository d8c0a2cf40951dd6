"""Numbers of schemas as the library reads them. Numbers that it would round are refused.

The library reads 64-bit floats as the product of digits and a power of ten, both of which are rounded first. With up to
15 digits and powers up to 22 the result is exact, otherwise it may be the next float.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any, TypeGuard

from photon_grpc.frontend.constraints.json_schema.nodes import Node, constants_of

#: Digits that a float keeps, and the largest power of ten that is exactly a float.
MAX_DIGITS, _MAX_POWER = 15, 22
#: Matches in the text of a number that may be read as another one.
MAY_BE_ROUNDED = r"[\d.]{16}|\d[eE][-+]?\d\d"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: With smaller steps, 1 is a multiple of more than 32 bits.
_LEAST_STEP = Decimal("1e-10")
#: Keywords of schemas for the same value.
_APPLICATORS = {"$ref", "allOf", "anyOf", "oneOf"}
_NO_CONSTRAINTS = {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"}


class ExactNumber(float):
    """A number of a schema with its digits, of which a float knows 17."""

    text: str

    def __new__(cls, text: str) -> ExactNumber:
        self = super().__new__(cls, text)
        self.text = text
        return self


def load(schema: str) -> Any:
    """Return the schema with its numbers as they are spelled, None if it is no JSON, which the compiler reports."""
    try:
        return json.loads(schema, parse_float=ExactNumber)
    except (ValueError, RecursionError):
        return None


def is_number(value: Any, limit: float = math.inf) -> TypeGuard[float]:
    """Return whether `value` is a number of a magnitude below `limit`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (limit == math.inf or abs(value) < limit)


def decimal(number: float) -> Decimal:
    """Return the number that the caller wrote."""
    return Decimal(number.text if isinstance(number, ExactNumber) else repr(number))


def is_plain(number: Decimal) -> bool:
    """Return whether the library reads and writes a number exactly; with more digits it may change them."""
    _, digits, exponent = number.as_tuple()
    return len(digits) <= MAX_DIGITS and isinstance(exponent, int) and -_MAX_POWER <= exponent <= _MAX_POWER


def as_read(number: Decimal) -> float:
    """Return the float that the library makes of a number of at most 19 digits."""
    sign, digits, exponent = number.normalize().as_tuple()
    if not isinstance(exponent, int):
        return float(number)
    magnitude = float(int("".join(map(str, digits))))
    magnitude = magnitude * float(f"1e{exponent}") if exponent >= 0 else magnitude / float(f"1e{-exponent}")
    return -magnitude if sign else magnitude


def rounded_number(nodes: list[Node]) -> str:
    """Return the problem of a constant that no output equals, or of an integer bound between two floats; "" if none."""
    bounds = [node[keyword] for node in nodes for keyword in _BOUNDS if keyword in node]
    wrong = [value for value in constants_of(nodes) if is_number(value) and _is_another(value)]
    wrong += [value for value in bounds if is_number(value) and _is_between(value)]
    if not wrong:
        return ""
    number = _cut(wrong[0].text if isinstance(wrong[0], ExactNumber) else wrong[0])
    return f"{number} would be rounded: constants and bounds are read as floats of 64 bits"


def clashing_steps(nodes: list[Node]) -> str:
    """Return the problem of `multipleOf` values that cannot be combined, "" if there is none.

    The library multiplies them as integers of 32 bits, which may overflow.
    """
    if not any(_combines(node) for node in nodes):
        return ""
    values = [node.get("multipleOf") for node in nodes]
    steps = sorted({decimal(step).copy_abs() for step in values if is_number(step, 2**32)})
    if len(steps) < 2 or not steps[0] or _has_small_product(steps):
        return ""
    return f"multipleOf {_cut(steps[0])} and {_cut(steps[-1])} cannot be combined: their product has more than 32 bits"


def _is_between(value: float) -> bool:
    """Return whether `value` is an integer that no float equals."""
    if not isinstance(value, int):
        return False
    try:
        return int(float(value)) != value
    except OverflowError:
        return True


def _is_another(value: float) -> bool:
    """Return whether the library writes another number instead of this constant."""
    if isinstance(value, int):
        # Integers beyond 64 bits are written with 17 digits, then zeros.
        return _is_between(value) or (not -(2**63) <= value < 2**63 and Decimal(repr(float(value))) != value)
    return math.isfinite(value) and not is_plain(decimal(value)) and as_read(Decimal(repr(float(value)))) != value


def _combines(node: Node) -> bool:
    """Return whether a value may have to satisfy two schemas because of this one."""
    applied = node.keys() & _APPLICATORS
    return (
        "allOf" in applied or "patternProperties" in node or bool(applied and node.keys() - applied - _NO_CONSTRAINTS)
    )


def _has_small_product(steps: list[Decimal]) -> bool:
    """Return whether the product of `steps`, which differ and ascend, fits in 32 bits."""
    if steps[0] <= _LEAST_STEP:
        return False
    unit = Decimal(1).scaleb(min([_exponent(step) for step in steps]))
    counts = [int(step / unit) for step in steps]
    return (math.prod(counts) if len(counts) == 2 else math.lcm(*counts) * counts[-1]) < 2**32


def _exponent(step: Decimal) -> int:
    exponent = step.normalize().as_tuple().exponent
    return min(exponent, 0) if isinstance(exponent, int) else 0


def _cut(number: Any) -> str:
    return str(number)[:40]
