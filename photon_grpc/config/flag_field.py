"""A setting as a field of a dataclass: its help, its choices and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Bounds of a number; None means no bound. `above` is exclusive."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )


ANY_NUMBER = NumberRange()


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    many: bool = False,
    metavar: str = "",
    bounds: NumberRange = ANY_NUMBER,
) -> Any:
    """Return a dataclass field that is a flag. A default of `None` is decided once the device and the model are known.

    `resolve` refuses a value that is not among the `choices` or not within `bounds`.
    """
    metadata = {"help": help, "choices": choices, "many": many, "metavar": metavar, "bounds": bounds}
    if many:
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)
