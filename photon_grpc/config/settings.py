"""All settings, read off the dataclasses in `flags`: a new field there is a flag, a variable, a line of `--help`, of
`doctor` and of docs/configuration.md, said once.
"""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any

from photon_grpc.config.flags import NumberRange, ServeConfig
from photon_grpc.errors import ConfigError

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one of the dataclasses in `flags`."""

    #: The field of ServeConfig that holds it, and the heading it stands under.
    section: str
    title: str
    name: str
    #: bool, int, float or str: of each element where `many`.
    kind: type
    #: None is a value: "decided when the device and the model are known".
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
        """Return the value that a text (of a flag or a variable) or a Python object stands for; a list or tuple where
        `many`.

        `source` is how the caller wrote it ("--dtype", "PHOTON_DTYPE"): what ConfigError names.
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
        """Return a variable holds several values with commas between them."""
        return [part.strip() for part in text.split(",") if part.strip()] if self.many else text

    def _one(self, value: Any, source: str) -> Any:
        converted = _parse(self.kind, value.strip()) if isinstance(value, str) else _take(self.kind, value)
        if converted is None or not self._is_allowed(converted):
            raise ConfigError(f"{source}: {value!r} is not allowed; it takes {self.allowed}", field=self.flag)
        return converted

    def _is_allowed(self, value: Any) -> bool:
        if self.kind in (int, float):
            return value in self.bounds
        return not self.choices or value in self.choices


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting, in the order of `--help`."""
    return tuple(_setting(section, field, kind) for section in fields(ServeConfig) for field, kind in _typed(section))


@cache
def by_name() -> dict[str, Setting]:
    """`max_num_seqs` -> its Setting."""
    return {setting.name: setting for setting in settings()}


def sections() -> dict[str, list[Setting]]:
    """Heading -> the settings under it, in the order of `--help`."""
    grouped: dict[str, list[Setting]] = {}
    for setting in settings():
        grouped.setdefault(setting.title, []).append(setting)
    return grouped


def in_keywords(text: str) -> str:
    """`text` with its flags as Python's keywords: max_num_seqs for --max-num-seqs."""

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
    """(kind, optional, many) of `int`, `int | None` or `tuple[int, ...]`."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return arguments[0], False, True
    if isinstance(hint, types.UnionType):
        (kind,) = (each for each in arguments if each is not type(None))
        return kind, True, False
    return hint, False, False


def _parse(kind: type, text: str) -> Any:
    """None where the text stands for no value of that kind."""
    if kind is bool:
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
    if kind is str:
        return text if text and is_text(text) else None
    try:
        return _take(kind, kind(text))
    except ValueError:
        return None


def _take(kind: type, value: Any) -> Any:
    """Return a Python value as that kind, None where it is none: a bool is no number, nan and infinities are no
    settings."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    if kind is str and hasattr(value, "__fspath__"):
        return _parse(str, str(value))
    return value if type(value) is kind else None


def is_text(text: str) -> bool:
    """Return whether it can be a path and be sent to another process: no lone surrogate (from bytes), no NUL."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)
