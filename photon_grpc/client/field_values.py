"""Python values written into fields of a request."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from photon_grpc.errors import InvalidRequest
from photon_grpc.v1 import inference_pb2 as pb

#: Types with a length and entries that cannot stand for a list in a request.
NO_LISTS = (bytes, bytearray, memoryview, Mapping)


def plain(value: Any) -> Any:
    """Convert an array or number of numpy or torch to its Python value; return any other value unchanged."""
    is_array = hasattr(value, "tolist") and not isinstance(value, type | memoryview)
    return value.tolist() if is_array else value


def write_field(message: Message, name: str, value: Any, path: str = "") -> None:
    """Set one field from a Python value. Raise InvalidRequest."""
    target = getattr(message, name)
    _check_texts(message, name, value, f"{path}.{name}" if path else name)
    try:
        _check_kind(target, value)
        if isinstance(target, Duration):
            target.FromTimedelta(timedelta(seconds=value))
        elif isinstance(target, pb.TokenIds):
            target.SetInParent()
            target.ids.extend(value)
        elif hasattr(target, "update"):
            target.update(value)
        elif hasattr(target, "extend"):
            target.extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, OverflowError, AttributeError) as problem:
        field = f"{path}.{name}" if path else name
        raise InvalidRequest(f"{field}: {reprlib.repr(value)} does not fit ({problem})", field=field) from problem


def _check_texts(message: Message, name: str, value: Any, path: str) -> None:
    """Raise InvalidRequest for an entry of a map or list of texts that is none; protobuf's message does not name it."""
    field = message.DESCRIPTOR.fields_by_name[name]
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{path} must be a mapping, is {_shown(value)}", field=path)
        if entry.fields_by_name["value"].type != FieldDescriptor.TYPE_STRING:
            return
        for key, text in value.items():
            _check_text(key, f"a key of {path}", path)
            _check_text(text, f"{path}[{reprlib.repr(key)}]", path)
    elif field.is_repeated and field.type == FieldDescriptor.TYPE_STRING and _is_list(value):
        for index, text in enumerate(value):
            _check_text(text, f"{path}[{index}]", path)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, *NO_LISTS))


def _check_text(value: Any, name: str, path: str) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a str, is {_shown(value)}", field=path)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _check_kind(target: Any, value: Any) -> None:
    """Raise TypeError for a value that protobuf would silently convert.

    It accepts a bool as a number, a number as a bool, bytes as text, and a string or mapping as a list of its
    characters or keys.
    """
    if isinstance(target, str):
        if not isinstance(value, str):
            raise TypeError(f"this field is a text, not {type(value).__name__}")
    elif isinstance(target, bool | int | float | Duration):
        if isinstance(value, bool) != isinstance(target, bool):
            raise TypeError("this field is a boolean" if isinstance(target, bool) else "this field is not a boolean")
    elif not hasattr(target, "update"):
        if isinstance(value, str):
            raise TypeError("one string, not a list of them")
        if isinstance(value, NO_LISTS):
            raise TypeError(f"{type(value).__name__}, not a list")
        if not {bool, bytes}.isdisjoint(map(type, value)):
            raise TypeError("a list with booleans or bytes")
