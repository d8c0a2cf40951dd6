"""The JSON Schema of a dataclass, from its type hints, and its objects read from JSON values."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from datetime import date, datetime, time
from typing import Any
from uuid import UUID

Read = Callable[[Any], Any]

_JSON_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Shape:
    """A type as a JSON Schema, with its reader."""

    schema: Mapping[str, Any]
    #: Makes an object of the type from a JSON value. Raises ValueError or TypeError.
    read: Read


def dataclass_shape(cls: type) -> Shape:
    """Return the shape of a dataclass. Raise TypeError, naming field and type, for a type without a schema."""
    shapes = _Shapes()
    root = shapes.of(cls, cls.__name__)
    return Shape({**root.schema, "$defs": shapes.definitions}, root.read)


class _Shapes:
    """The shapes of one schema. Each class is defined once, so that it may contain itself."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[type, str] = {}
        self._readers: dict[type, Read] = {}

    def of(self, kind: Any, where: str) -> Shape:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments, where)
        if origin is typing.Literal:
            return _one_of({(type(_plain(each)), _plain(each)): each for each in arguments}, where)
        if origin is list or (origin is tuple and arguments[1:] == (...,)):
            return self._list(origin, arguments[0], where)
        if origin is tuple:
            return self._tuple(arguments, where)
        if origin is dict and arguments[0] is str:
            return self._dict(arguments[1], where)
        return self._class(kind, where)

    def _class(self, kind: Any, where: str) -> Shape:
        if kind is None or kind is type(None):
            return Shape({"type": "null"}, _typed(type(None), where))
        if kind in _PLAIN:
            return Shape({"type": _PLAIN[kind]}, _typed(kind, where))
        if kind in _FORMATS:
            name, read = _FORMATS[kind]
            return Shape({"type": "string", "format": name}, _formatted(read, where))
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return _one_of({(type(each.value), each.value): each for each in kind}, where)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self._dataclass(kind)
        raise TypeError(f"{where} is {_name_of(kind)}, which has no JSON Schema here; {_KNOWN}")

    def _union(self, kinds: tuple[Any, ...], where: str) -> Shape:
        shapes = [self.of(kind, where) for kind in kinds]

        def read(value: Any) -> Any:
            problems: list[str] = []
            for shape in shapes:
                try:
                    return shape.read(value)
                except (TypeError, ValueError) as error:
                    problems.append(str(error))
            raise ValueError("; ".join(problems))

        return Shape({"anyOf": [shape.schema for shape in shapes]}, read)

    def _list(self, container: Callable[[Any], Any], kind: Any, where: str) -> Shape:
        item = self.of(kind, f"{where}[]")
        return Shape(
            {"type": "array", "items": item.schema},
            lambda value: container(item.read(each) for each in _checked(value, list, where)),
        )

    def _tuple(self, kinds: tuple[Any, ...], where: str) -> Shape:
        items = [self.of(kind, f"{where}[{index}]") for index, kind in enumerate(kinds)]
        schema = {"type": "array", "prefixItems": [item.schema for item in items], "items": False}
        size = {"minItems": len(items), "maxItems": len(items)}

        def read(value: Any) -> tuple[Any, ...]:
            pairs = zip(items, _checked(value, list, where), strict=True)
            return tuple(item.read(each) for item, each in pairs)

        return Shape(schema | size if items else {"type": "array", "maxItems": 0}, read)

    def _dict(self, kind: Any, where: str) -> Shape:
        item = self.of(kind, f"{where}[str]")
        return Shape(
            {"type": "object", "additionalProperties": item.schema},
            lambda value: {key: item.read(each) for key, each in _checked(value, dict, where).items()},
        )

    def _dataclass(self, cls: type) -> Shape:
        if cls not in self._names:
            same = sum(each.__name__ == cls.__name__ for each in self._names)
            self._names[cls] = f"{cls.__name__}{same + 1}" if same else cls.__name__
            self.definitions[self._names[cls]], self._readers[cls] = self._defined(cls)
        return Shape({"$ref": f"#/$defs/{self._names[cls]}"}, lambda value: self._readers[cls](value))

    def _defined(self, cls: type) -> tuple[dict[str, Any], Read]:
        where, hints = cls.__name__, _hints(cls)
        fields = [field for field in dataclasses.fields(cls) if field.init]
        shapes = {field.name: self.of(hints[field.name], f"{where}.{field.name}") for field in fields}
        required = [each.name for each in fields if each.default is MISSING and each.default_factory is MISSING]
        _check_arguments(cls, shapes.keys())

        def read(value: Any) -> Any:
            given = _checked(value, dict, where)
            if unknown := given.keys() - shapes.keys():
                raise ValueError(f"{where} has no field {min(unknown)!r}")
            return cls(**{name: shapes[name].read(each) for name, each in given.items()})

        properties = {name: shape.schema for name, shape in shapes.items()}
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        return schema, read


_PLAIN: Mapping[Any, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
_FORMATS: Mapping[Any, tuple[str, Callable[[str], Any]]] = {
    datetime: ("date-time", datetime.fromisoformat),
    date: ("date", date.fromisoformat),
    time: ("time", time.fromisoformat),
    UUID: ("uuid", UUID),
}
_KNOWN = (
    "there are str, int, float, bool, None, list[T], tuple, dict[str, T], unions, Literal, Enum, dataclasses, "
    "datetime, date, time and UUID"
)


def _one_of(members: Mapping[tuple[type, Any], Any], where: str) -> Shape:
    """Return the shape of a fixed set of JSON values, each standing for its member. True and 1 differ."""
    if not members:
        raise TypeError(f"{where} is an Enum without members")
    for kind, value in members:
        if kind not in _JSON_SCALARS:
            raise TypeError(f"{where} may be {value!r}, which is not text, a number, a bool or None")

    def read(value: Any) -> Any:
        if (type(value), value) not in members:
            raise _wrong(where, value)
        return members[type(value), value]

    return Shape({"enum": [value for _, value in members]}, read)


def _typed(kind: type, where: str) -> Read:
    def read(value: Any) -> Any:
        return float(value) if kind is float and type(value) is int else _checked(value, kind, where)

    return read


def _formatted(read: Callable[[str], Any], where: str) -> Read:
    def read_text(value: Any) -> Any:
        try:
            return read(_checked(value, str, where))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    return read_text


def _checked(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise _wrong(where, value)
    return value


def _wrong(where: str, value: Any) -> ValueError:
    return ValueError(f"{where} cannot be read from {type(value).__name__}")


def _plain(literal: Any) -> Any:
    return literal.value if isinstance(literal, enum.Enum) else literal


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, AttributeError, SyntaxError) as error:
        raise TypeError(f"the type hints of {cls.__name__} cannot be read: {error}") from None


def _check_arguments(cls: type, names: typing.AbstractSet[str]) -> None:
    """Raise TypeError if the fields alone cannot make an object (InitVar)."""
    for each in inspect.signature(cls).parameters.values():
        if each.name not in names and each.default is each.empty and each.kind is not each.VAR_KEYWORD:
            raise TypeError(f"{cls.__name__}.{each.name} is an argument and no field; give it a default")


def _name_of(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
