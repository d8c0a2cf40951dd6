"""Numbers, times and enums that keep their rules, as Lark terminals of their JSON."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from google.protobuf.descriptor import EnumDescriptor

from photon_grpc.server.services.rules.ranges import decimals, integers, same_length

#: Kinds of rules -> the range of their integers.
INTEGERS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("int32", "sint32", "sfixed32"), (-(2**31), 2**31 - 1)),
    **dict.fromkeys(("uint32", "fixed32"), (0, 2**32 - 1)),
    **dict.fromkeys(("int64", "sint64", "sfixed64"), (-(2**63), 2**63 - 1)),
    **dict.fromkeys(("uint64", "fixed64"), (0, 2**64 - 1)),
}
_PLACES = 6
#: What a number without a bound is below; above it they would need many digits.
_WIDE = Decimal(10) ** 15
#: Above it an expression of numbers in a range would nest too deep.
_WRITTEN = Decimal(10) ** 60
#: Kinds of rules -> their greatest number.
_GREATEST = {"float": Decimal(2) ** 128 - Decimal(2) ** 104, "double": Decimal(sys.float_info.max)}
_MAX_DURATION_S = Decimal(315_576_000_000)
_FIRST, _LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = "%Y-%m-%dT%H:%M:%S"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = (
    r"([0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    rf"|{_LEAP_YEAR}-02-29)T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
)
_ORDER = ("gt", "gte", "lt", "lte")
_IGNORED = frozenset({"example", "finite"})  # NaN and infinities are never written

#: The least and the greatest of an interval.
Interval = tuple[Any, Any]
Unheld = Callable[[str], None]


class Unsatisfiable(Exception):
    """Raised where no value keeps all rules."""


def integer(kind: str, rules: Mapping[str, Any], unheld: Unheld, *, is_key: bool) -> str:
    """Return a terminal of the integers that keep `rules`; "" if none of them says which. Raise Unsatisfiable."""
    ways = [integers(*each) for each in _intervals(rules, *INTEGERS[kind], lambda value, step: value + step)]
    return _terminal(rules, ways, str, unheld, is_quoted=is_key or kind.endswith("64"))


def number(kind: str, given: Mapping[str, Any], unheld: Unheld) -> str:
    """Return a terminal of the floats or doubles that keep `rules`."""
    near = _near_float if kind == "float" else _near_double
    bounds = {name: given[name] for name in _ORDER if name in given and math.isfinite(given[name])}
    greatest = _GREATEST[kind]
    found = [(low, high) for low, high in _intervals(bounds, -greatest, greatest, near) if low <= high]
    if not found or found[0][0] > greatest or found[-1][1] < -greatest:
        raise Unsatisfiable
    widest = min(max([_WIDE, *[abs(Decimal(each)) * 10 for each in bounds.values()]]), greatest, _WRITTEN)
    written = [(max(low, -widest), min(high, widest)) for low, high in found]
    ways = [decimals(low, high, _PLACES) for low, high in written if low <= high]
    rules, ways = _coarse(given, ways, unheld)
    terminal = _terminal(rules, ways, json.dumps, unheld)
    if not terminal and "not_in" in given:
        unheld("not_in")
        return ""
    return " & ".join([terminal, *[f"~/{_spelled(each)}/" for each in rules.get("not_in", ())]])


def duration(rules: Mapping[str, Any], unheld: Unheld) -> str:
    """Return a terminal of the durations that keep `rules`."""
    seconds = {name: _seconds(value) for name, value in rules.items() if name in _ORDER}
    nanosecond = Decimal("1e-9")
    found = _intervals(seconds, -_MAX_DURATION_S, _MAX_DURATION_S, lambda value, step: value + step * nanosecond)
    ways = [decimals(least, most, 3, all_places=True) for least, most in found]
    rules, written = _coarse(rules, [f"({way})s" for way in ways if way], unheld)
    return _terminal(rules, written, lambda each: str(each.ToJsonString()), unheld, is_quoted=True)


def timestamp(rules: Mapping[str, Any], unheld: Unheld) -> str:
    """Return a terminal of the times, in whole seconds, that keep `rules`."""
    times = {name: _seconds(value) for name, value in rules.items() if name in _ORDER}
    first, last = [Decimal((each - _EPOCH) // timedelta(seconds=1)) for each in (_FIRST, _LAST)]
    nanosecond = Decimal("1e-9")
    ways = []
    for least, most in _intervals(times, first, last, lambda value, step: value + step * nanosecond):
        begin, end = math.ceil(least), math.floor(most)
        if begin <= end:
            ways.append(same_length(_written(begin), _written(end)) + "Z")
    rules, ways = _coarse(rules, ways, unheld)
    terminal = _terminal(rules, ways, lambda each: str(each.ToJsonString()), unheld, is_quoted=True)
    return f'{terminal} & /"{_DAY}"/' if terminal and not {"const", "in"} & rules.keys() else terminal


def enum_value(descriptor: EnumDescriptor, rules: Mapping[str, Any], unheld: Unheld) -> str:
    """Return a terminal of the names of an enum's values that keep `rules`."""
    allowed = {value.number for value in descriptor.values} - set(rules.get("not_in", ()))
    if "const" in rules:
        allowed &= {rules["const"]}
    if "in" in rules:
        allowed &= set(rules["in"])
    _rest(rules, {"const", "in", "not_in", "defined_only"}, unheld)
    return _one_of([value.name for value in descriptor.values if value.number in allowed], is_quoted=True)


def boolean(rules: Mapping[str, Any], unheld: Unheld, *, is_key: bool) -> str:
    """Return a terminal of the one value that keeps `rules`; "" if both do."""
    _rest(rules, {"const"}, unheld)
    return _one_of([json.dumps(rules["const"])], is_quoted=is_key) if "const" in rules else ""


def _intervals(rules: Mapping[str, Any], least: Any, most: Any, near: Callable[[Any, int], Any]) -> Iterator[Interval]:
    """Yield the intervals of what keeps the order of `rules`; where the upper bound is the smaller, those outside.

    `near` returns the value next to another, above or below it, or by a step of 0 the value itself.
    """
    low, high = least, most
    if "gte" in rules or "gt" in rules:
        low = near(rules["gte"], 0) if "gte" in rules else near(rules["gt"], 1)
    if "lte" in rules or "lt" in rules:
        high = near(rules["lte"], 0) if "lte" in rules else near(rules["lt"], -1)
    if len(rules.keys() & set(_ORDER)) == 2 and rules.get("lte", rules.get("lt")) < rules.get("gte", rules.get("gt")):
        yield least, high
        yield low, most
    else:
        yield low, high


def _coarse(rules: Mapping[str, Any], ways: list[str], unheld: Unheld) -> tuple[Mapping[str, Any], list[str]]:
    """Return the rules without those of order, where no value that is written as coarsely as here keeps them."""
    if any(ways):
        return rules, ways
    for name in rules.keys() & set(_ORDER):
        unheld(name)
    return {name: value for name, value in rules.items() if name in ("const", "in")}, [".*"]


def _terminal(
    rules: Mapping[str, Any],
    ways: Iterable[str],
    written: Callable[[Any], str],
    unheld: Unheld,
    *,
    is_quoted: bool = False,
) -> str:
    """Return a terminal of what is in a range of `ways`, in a list, and not in another; "" without such a rule.

    Raise Unsatisfiable.
    """
    _rest(rules, {*_ORDER, "const", "in", "not_in"}, unheld)
    quote = '"' if is_quoted else ""
    parts = []
    if "const" in rules or "in" in rules:
        values = [rules["const"]] if "const" in rules else rules["in"]
        parts.append(_one_of([written(each) for each in values], is_quoted=is_quoted))
    elif rules.keys() & {*_ORDER, "not_in"}:
        found = "|".join(filter(None, ways))
        if not found:
            raise Unsatisfiable
        parts.append(f"/{quote}({found}){quote}/")
    if "not_in" in rules:
        parts.append(f"~{_one_of([written(each) for each in rules['not_in']], is_quoted=is_quoted)}")
    return " & ".join(parts)


def _one_of(values: Iterable[str], *, is_quoted: bool) -> str:
    quote = '"' if is_quoted else ""
    escaped = [each.replace("+", r"\+").replace(".", r"\.").replace("-", r"\-") for each in values]
    if not escaped:
        raise Unsatisfiable
    return f"/{quote}({'|'.join(escaped)}){quote}/"


def _spelled(value: float) -> str:
    """Return an expression of the decimals that are equal to `value`."""
    digits = f"{value:.{_PLACES}f}".rstrip("0")
    whole, _, fraction = digits.partition(".")
    return rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0*)?"


def _rest(rules: Mapping[str, Any], held: set[str], unheld: Unheld) -> None:
    for name in rules.keys() - held - _IGNORED:
        unheld(name)


def _seconds(value: Any) -> Decimal:
    return Decimal(value.seconds) + Decimal(value.nanos).scaleb(-9)


def _written(second: int) -> str:
    time = _EPOCH + timedelta(seconds=second)
    return f"{time.year:04d}{time.strftime(_TIME)[-15:]}"


def _near_double(value: float, step: int) -> Decimal:
    if not step:
        return Decimal(value)
    return Decimal(math.nextafter(value, math.copysign(math.inf, step)))


def _near_float(value: float, step: int) -> Decimal:
    """Return the float of 32 bits next to one."""
    if not step:
        return Decimal(value)
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    if value == 0:
        return Decimal(step) * Decimal(2) ** -149
    away = step if value > 0 else -step
    (near,) = struct.unpack("<f", struct.pack("<i", bits + away))
    return Decimal(near)
