"""Types of flags that are numbers: `--help` shows their bounds, and an error names the allowed values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click


class WholeNumber(click.IntRange):
    """A whole number within bounds, or the value that turns the option off."""

    def __init__(self, least: int | None = None, most: int | None = None, *, off: int | None = None) -> None:
        super().__init__(least, most)
        self._off = off
        self._or_off = "" if off is None else f", or {off} (off)"

    def _describe_range(self) -> str:
        """Return the bounds for `--help`. Without bounds click would print `x<=None`."""
        return super()._describe_range() + self._or_off if _bounds(self) else ""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or not (number == self._off or _is_within(self, number)):
            self.fail(f"{value!r} is not a whole number{_bounds(self)}{self._or_off}", param, ctx)
        return number


class Number(click.FloatRange):
    """A finite number within bounds; with `is_open`, `least` itself is not allowed."""

    def __init__(self, least: float | None = None, most: float | None = None, *, is_open: bool = False) -> None:
        super().__init__(least, most, min_open=is_open)

    def _describe_range(self) -> str:
        """Return the bounds for `--help`. Without bounds click would print `x<=None`."""
        return super()._describe_range() if _bounds(self) else ""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and _is_within(self, number)):
            self.fail(f"{value!r} is not a number{_bounds(self)}", param, ctx)
        return number


def whole_number(
    flag: str, help: str, kind: WholeNumber | None = None, *, default: int | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a click option that takes a whole number, of at least 1 without `kind`; `--help` shows its default."""
    has_default = default is not None
    return click.option(
        flag, type=kind or WholeNumber(1), default=default, show_default=has_default, metavar="N", help=help
    )


def _is_within(bounds: click.IntRange | click.FloatRange, number: float) -> bool:
    if bounds.min is not None and (number <= bounds.min if bounds.min_open else number < bounds.min):
        return False
    return bounds.max is None or number <= bounds.max


def _bounds(bounds: click.IntRange | click.FloatRange) -> str:
    """Return the bounds in words: " of at least 1", " above 0", " in [0, 2]"; "" if there are none."""
    if bounds.min is None:
        return "" if bounds.max is None else f" of at most {bounds.max:g}"
    if bounds.max is None:
        return f" above {bounds.min:g}" if bounds.min_open else f" of at least {bounds.min:g}"
    return f" in {'(' if bounds.min_open else '['}{bounds.min:g}, {bounds.max:g}]"
