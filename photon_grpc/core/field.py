"""The declaration of one option of a request: its bounds and their error texts, its defaults, its flag.

Standard library only: the client installs without msgspec.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from photon_grpc.errors import InvalidRequest

#: The subcommands that have a flag for the option.
ALL_VERBS, CONVERSATIONS, ANSWERS, ONE_REQUEST = "generate chat batch", "generate chat", "generate batch", "generate"


@dataclass(frozen=True, slots=True)
class Interval:
    """A range of numbers."""

    least: float
    #: A str is the name of a limit of the model (frontend.model.RequestLimits).
    most: float | str = math.inf
    #: True: `least` itself is not allowed.
    is_open: bool = False
    #: The value outside the range that turns the option off.
    off: int | None = None

    def holds(self, value: float, most: float) -> bool:
        """Return whether a value is in the range, where `most` is the number that `self.most` stands for."""
        if value == self.off:
            return True
        is_enough = self.least < value if self.is_open else self.least <= value
        return is_enough and value <= most and value != math.inf

    def nearest(self, value: float, most: float) -> float:
        """Return the bound that a value outside the range breaks."""
        return most if value > most else self.least

    def rule(self, most: float) -> str:
        """Say what a value must be, for an error message."""
        least = _shown(self.least)
        if self.off is not None:
            return f"be {self.off} (off) or lie between {least} and {_shown(most)}"
        if most == math.inf:
            return f"be finite and at least {least}" if isinstance(self.least, float) else f"be at least {least}"
        return (
            f"be above {least} and at most {_shown(most)}"
            if self.is_open
            else f"lie between {least} and {_shown(most)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One option of a request."""

    #: Help of the command-line flag; empty if there is no flag.
    help: str = ""
    #: Bounds of the number, or of each number in a map.
    bounds: Interval | None = None
    max_chars: int = 0
    #: The attribute of frontend.model.ModelFacts that limits the entries of a list.
    max_items: str = ""
    #: The value of a request if neither caller nor model sets the option. None: decided elsewhere.
    neutral: Any = None
    #: The value of an unset option in an Ask.
    default: Any = None
    #: Whether the option has a meaning for `LLM`, which has no wire and serves one model.
    is_for_llm: bool = True
    #: What a non-neutral sampling parameter does to logits: "filter" or "penalty".
    effect: str = ""
    #: Unit of the number, which is a Duration in the protos.
    unit: str = ""
    #: The flag if it differs from the option's name.
    flag: str = ""
    metavar: str = ""
    verbs: str = ALL_VERBS
    # Filled in from the declaration.
    name: str = ""
    #: The field of GenerateRequest whose message holds it; empty for GenerateRequest itself.
    group: str = ""
    kind: Any = None

    @property
    def path(self) -> str:
        """The name of the field in errors, as the API spells it."""
        return f"{self.group}.{self.name}" if self.group else self.name

    @property
    def attribute(self) -> str:
        """The name in an Ask, with the unit."""
        return f"{self.name}_{self.unit}" if self.unit else self.name

    @property
    def stored_kind(self) -> Any:
        """The type of a set value in an Ask or a Request: immutable."""
        if get_origin(self.kind) is Sequence:
            return tuple[(*get_args(self.kind), ...)]  # type: ignore[misc]
        return tuple[tuple[get_args(self.kind)], ...] if get_origin(self.kind) is Mapping else self.kind  # type: ignore[misc]

    @property
    def empty(self) -> Any:
        """The value in a Request if it is unset and has no neutral value."""
        return () if get_origin(self.kind) else self.kind()

    @property
    def is_checked(self) -> bool:
        """Whether `check` applies. `check_each` checks the numbers of a map."""
        return (self.bounds is not None and not self.max_items) or self.max_chars > 0

    def sure_range(self, limits: object) -> tuple[Any, Any]:
        """Return bounds between which every value passes `check`, or two empty texts if `check` must be called."""
        if self.bounds is None:
            return "", ""
        least = math.nextafter(self.bounds.least, math.inf) if self.bounds.is_open else self.bounds.least
        most = getattr(limits, self.bounds.most) if isinstance(self.bounds.most, str) else self.bounds.most
        return least, min(most, sys.float_info.max)

    def check(self, value: Any, limits: object = None) -> None:
        """Check a number or a text. Raise InvalidRequest.

        Args:
            limits: has the limits that bounds name; None skips them.
        """
        if self.bounds is not None:
            self._check_number(value, limits)
        elif self.max_chars and len(value) > self.max_chars:
            message = f"{self.path}: has {len(value)} characters; {self.max_chars} are allowed"
            raise InvalidRequest(message, field=self.path, needed=len(value), limit=self.max_chars)

    def _check_number(self, value: float, limits: object, at: str = "") -> None:
        bounds: Any = self.bounds
        is_named = isinstance(bounds.most, str)
        most = getattr(limits, bounds.most, math.inf) if is_named else bounds.most
        if not bounds.holds(value, most):
            value, unit = _shortest(value), f" {self.unit}" if self.unit else ""
            message = f"{self.path}{at}: must {bounds.rule(most)}{unit}, is {value}{unit}"
            numbers = {"needed": value, "limit": bounds.nearest(value, most)} if _is_finite(value) else {}
            raise InvalidRequest(message, field=f"{self.path}{at}", **numbers)

    def check_each(self, pairs: Sequence[tuple[int, float]]) -> None:
        """Check the numbers of a map. Raise InvalidRequest."""
        for key, value in pairs:
            self._check_number(value, None, f"[{key}]")


def _shortest(number: float) -> float:
    """Return a number of 32 bits as the one with the fewest digits that rounds to it: 1.1, not 1.100000023841858."""
    if isinstance(number, float) and math.isfinite(number) and _as_float32(number) == number:
        return next(
            (short for digits in range(1, 9) if _as_float32(short := float(f"{number:.{digits}g}")) == number), number
        )
    return number


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _as_float32(number: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.inf


def _shown(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
