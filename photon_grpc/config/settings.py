"""All settings, derived from the dataclasses in `flags`.

A new field there is a flag, a variable, and a line of `--help`, of `doctor` and of docs/configuration.md.
"""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any

from photon_grpc.config.flag_field import NumberRange
from photon_grpc.config.flags import ServeConfig
from photon_grpc.errors import ConfigError

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one of the dataclasses in `flags`."""

    #: The field of ServeConfig that holds it, and its heading.
    section: str
    title: str
    name: str
    #: bool, int, float or str; with `many` the type of each element.
    kind: type
    #: None is allowed: the value is decided when the device and the model are known.
    optional: bool
    many: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    metavar: str
    bounds: NumberRange

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def no_flag(self) -> str:
        """The flag that turns a bool off."""
        return "--no-" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PHOTON_" + self.name.upper()

    @property
    def allowed(self) -> str:
        """The allowed values in words: "a whole number, at least 1"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]
        words = {"at least": self.bounds.at_least, "above": self.bounds.above, "at most": self.bounds.at_most}
        return ", ".join([noun, *(f"{word} {_plain(bound)}" for word, bound in words.items() if bound is not None)])

    def convert(self, value: Any, source: str) -> Any:
        """Convert the text of a flag or variable, or a Python object, to a value; with `many` to a tuple.

        Raise ConfigError naming `source`, such as "--dtype" or "PHOTON_DTYPE".
        """
        if value is None and self.optional:
            return None
        if not self.many:
            return self._one(value, source)
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values:
            raise ConfigError(f"{source}: at least one value is needed, {self.allowed}", field=self.flag)
        return tuple(self._one(each, source) for each in values)

    def split(self, text: str) -> Any:
        """Split the text of a variable that holds several values at its commas."""
        return [part.strip() for part in text.split(",") if part.strip()] if self.many else text

    def _one(self, value: Any, source: str) -> Any:
        converted = _parse(self.kind, value.strip()) if isinstance(value, str) else _take(self.kind, value)
        if converted is None or not self._is_allowed(converted):
            raise ConfigError(f"{source}: must be {self.allowed}; got {value!r}", field=self.flag)
        return converted

    def _is_allowed(self, value: Any) -> bool:
        if self.choices:
            return str(value) in self.choices
        return self.kind not in (int, float) or value in self.bounds


@cache
def settings() -> tuple[Setting, ...]:
    """Return every setting, in the order of `--help`."""
    return tuple(_setting(section, field, kind) for section in fields(ServeConfig) for field, kind in _typed(section))


@cache
def by_name() -> dict[str, Setting]:
    """Return the settings by name, such as `max_num_seqs`."""
    return {setting.name: setting for setting in settings()}


def sections() -> dict[str, list[Setting]]:
    """Return the settings by heading, in the order of `--help`."""
    grouped: dict[str, list[Setting]] = {}
    for setting in settings():
        grouped.setdefault(setting.title, []).append(setting)
    return grouped


def in_keywords(text: str) -> str:
    """Replace flags in a text by Python's keywords: --max-num-seqs by max_num_seqs."""

    def keyword(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return name if name in by_name() else found[0]

    return _FLAG.sub(keyword, text)


def section_class(section: Field[Any]) -> type:
    """Return the dataclass that a field of ServeConfig holds."""
    return typing.cast(type, typing.get_type_hints(ServeConfig)[section.name])


def _typed(section: Field[Any]) -> list[tuple[Field[Any], Any]]:
    cls = section_class(section)
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in fields(cls)]


def _setting(section: Field[Any], field: Field[Any], hint: Any) -> Setting:
    kind, optional, many = _shape(hint)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    title = (section_class(section).__doc__ or section.name).strip().splitlines()[0].rstrip(".")
    return Setting(
        section=section.name,
        title=title,
        name=field.name,
        kind=kind,
        optional=optional,
        many=many,
        default=default,
        help=field.metadata["help"],
        choices=field.metadata["choices"],
        metavar=field.metadata["metavar"],
        bounds=field.metadata["bounds"],
    )


def _shape(hint: Any) -> tuple[type, bool, bool]:
    """Return (kind, optional, many) of a hint such as `int`, `int | None` or `tuple[int, ...]`."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return arguments[0], False, True
    if isinstance(hint, types.UnionType):
        (kind,) = (each for each in arguments if each is not type(None))
        return kind, True, False
    return hint, False, False


def _parse(kind: type, text: str) -> Any:
    """Return the value that a text stands for; None if it is not of that kind."""
    if kind is bool:
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
    if kind is str:
        return text if text and is_text(text) else None
    try:
        return _take(kind, kind(text))
    except ValueError:
        return None


def _take(kind: type, value: Any) -> Any:
    """Return a Python value as that kind, None if it is of another kind, NaN or infinite; a bool is not a number."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    if kind is str and hasattr(value, "__fspath__"):
        return _parse(str, str(value))
    return value if type(value) is kind else None


def is_text(text: str) -> bool:
    """Return whether it can be a path or sent to a process: it has no NUL and no lone surrogate (from bytes)."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)
