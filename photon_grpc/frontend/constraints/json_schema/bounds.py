"""Bounds of numbers, rewritten for a library that accepts some numbers beyond them.

Its expression of `> 4, < 4.001` accepts `4`, that of `>= -0.5, < 0` accepts `-0`, and it adds 1 to an exclusive bound
of integers in floats, which changes nothing at 2^53. It is right about inclusive bounds that it reads exactly
(numbers.py), and about exclusive ones on the far side of 0. Any other bound becomes the next number within that has 15
digits. That excludes nearer numbers, among them those that a 64-bit float would round to the bound itself.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal
from typing import Any

from photon_grpc.frontend.constraints.json_schema.nodes import Node
from photon_grpc.frontend.constraints.json_schema.numbers import MAX_DIGITS, as_read, decimal, is_number, is_plain

#: The most digits after the point, since the library's expressions nest with every one.
_MAX_PLACES = 60
#: The first number above 0.
_LEAST = Decimal("1e-15")
#: The library refuses bounds of 2^63 and above.
_TOO_LARGE = 1e300
#: The bound, its exclusive form, and the direction to the numbers within.
_BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))


def exact_bounds(node: Node, _: Any) -> bool:
    """Make the bounds of a schema exact; return whether that changed them."""
    return sum([_narrowed(node, *bound) for bound in _BOUNDS]) > 0


def _narrowed(node: Node, inclusive: str, exclusive: str, way: int) -> bool:
    bound, strict = node.get(inclusive), node.get(exclusive)
    if strict is True and is_number(bound, _TOO_LARGE):  # the form of draft 4
        bound, strict = None, bound
    is_integer = node.get("type") == "integer"
    bounds = [_within(bound, False, is_integer, way)] if is_number(bound, _TOO_LARGE) else []
    new = {}
    if is_number(strict, _TOO_LARGE) and _is_left_out(strict, way):
        new[exclusive] = strict
    elif is_number(strict, _TOO_LARGE):
        bounds.append(_within(strict, True, is_integer, way))
    if bounds:
        new[inclusive] = max(bounds, key=lambda number: way * number)
    if not new or all(node.get(keyword) is new.get(keyword) for keyword in (inclusive, exclusive)):
        return False
    node.pop(inclusive, None)
    node.pop(exclusive, None)
    node.update(new)
    return True


def _is_left_out(bound: float, way: int) -> bool:
    """Return whether the library excludes this exclusive bound, because the numbers within are nearer to 0."""
    number = decimal(bound)
    return number.adjusted() < MAX_DIGITS and way * bound < 0 and is_plain(number)


def _within(number: float, is_exclusive: bool, is_integer: bool, way: int) -> float:
    """Return the nearest number within a bound that the library reads exactly; `way` is 1 or -1, towards the inside."""
    bound = decimal(number)
    least = bound if way > 0 else bound.copy_negate()
    if least.adjusted() >= MAX_DIGITS:
        integer = way * _integer_from(least, is_exclusive, is_integer)
        return number if integer == bound else integer
    if not is_exclusive and is_plain(bound):
        return number
    step = Decimal(1).scaleb(-min(MAX_DIGITS - 1 - least.adjusted(), _MAX_PLACES)) if least else _LEAST
    nearest = least.quantize(step, ROUND_CEILING)
    while not _is_within(Decimal(repr(as_read(nearest))), least, is_exclusive):
        nearest += step
    return way * float(nearest) + 0.0


def _integer_from(least: Decimal, is_exclusive: bool, is_integer: bool) -> int:
    """Return the nearest integer where all floats are integers; non-integers are written with 17 digits, then zeros."""
    number = float(math.ceil(least))
    while not _is_within(Decimal(int(number)), least, is_exclusive) or not (
        is_integer or _is_within(Decimal(repr(number)), least, is_exclusive)
    ):
        number = math.nextafter(number, math.inf)
    return int(number)


def _is_within(number: Decimal, least: Decimal, is_exclusive: bool) -> bool:
    return number > least if is_exclusive else number >= least
