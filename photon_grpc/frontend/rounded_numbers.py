"""Numbers in schemas that the compiler would round: it reads them as floats of 64 bits, and some as the next one."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from photon_grpc.frontend.exact_numbers import Spelled, decimal, is_kept, load, may_be_rounded
from photon_grpc.frontend.schema_nodes import schemas_of

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: Of smaller ones a 1 has more than 32 bits.
_LEAST_STEP = Decimal("1e-10")
#: Schemas of the same value.
_APPLICATORS = {"$ref", "allOf", "anyOf", "oneOf"}
_SAYS_NOTHING = {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"}


def rounded_number(schema: str) -> str | None:
    """A constant that no output would be equal to, or a bound that is an integer between two floats, of this schema, a
    JSON text; None where there is none."""
    if not may_be_rounded(schema):
        return None
    try:
        root = load(schema)
    except (ValueError, RecursionError):  # the compiler says what is wrong with it
        return None
    for node in schemas_of(root):
        found = _first([node[keyword] for keyword in ("const", "enum") if keyword in node], _is_another)
        found = found or _first([node[keyword] for keyword in _BOUNDS if keyword in node], _is_between)
        if found is not None:
            return found
    return None


def clashing_steps(schema: str) -> str | None:
    """The reason that the `multipleOf` of this schema, a JSON text, may not be met together: where two are combined,
    the compiler multiplies them as integers of 32 bits, and what is above is lost. None where they may."""
    if schema.count('"multipleOf"') < 2:
        return None
    try:
        root = load(schema)
    except (ValueError, RecursionError):  # the compiler says what is wrong with it
        return None
    nodes = list(schemas_of(root))
    if not any(_combines(node) for node in nodes):
        return None
    steps = sorted({decimal(node["multipleOf"]).copy_abs() for node in nodes if _is_number(node.get("multipleOf"))})
    return _product_problem(steps)


def _combines(node: dict[str, Any]) -> bool:
    """Return whether a value may have to satisfy two schemas because of this one."""
    applied = node.keys() & _APPLICATORS
    return "allOf" in applied or "patternProperties" in node or bool(applied and node.keys() - applied - _SAYS_NOTHING)


def _product_problem(steps: list[Decimal]) -> str | None:
    """`steps` differ."""
    if len(steps) < 2 or not steps[0]:
        return None
    if steps[0] > _LEAST_STEP:
        unit = Decimal(1).scaleb(min([_exponent(step) for step in steps]))
        counts = [int(step / unit) for step in steps]
        if (math.prod(counts) if len(counts) == 2 else math.lcm(*counts) * counts[-1]) < 2**32:
            return None
    return f"multipleOf {_cut(steps[0])} and {_cut(steps[-1])} cannot be combined: their product has more than 32 bits"


def _exponent(step: Decimal) -> int:
    exponent = step.normalize().as_tuple().exponent
    return min(exponent, 0) if isinstance(exponent, int) else 0


def _cut(number: Decimal) -> str:
    return str(number)[:40]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**32


def _first(waiting: list[Any], is_wrong: Callable[[float], bool]) -> str | None:
    while waiting:
        value = waiting.pop()
        if isinstance(value, int | float) and not isinstance(value, bool) and is_wrong(value):
            return str(value.text if isinstance(value, Spelled) else value)[:40]
        if isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value
    return None


def _is_between(value: float) -> bool:
    """Return whether it is an integer that no float is equal to."""
    if not isinstance(value, int):
        return False
    try:
        return int(float(value)) != value
    except OverflowError:
        return True


def _is_another(value: float) -> bool:
    """Return whether the compiler writes another number in place of this constant."""
    if isinstance(value, int):
        # Beyond 64 bits with 17 digits, and zeros behind them.
        return _is_between(value) or (not -(2**63) <= value < 2**63 and Decimal(repr(float(value))) != value)
    return math.isfinite(value) and not is_kept(value)
