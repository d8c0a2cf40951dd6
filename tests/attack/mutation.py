"""Messages drawn at random from what a method takes, and ways of breaking their bytes. The same draw gives the same
bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_WORDS = (
    "",
    "def fib(n):",
    "a",
    "photon-demo",
    "user",
    "[]",
    "{}",
    "\n",
    "ü🙂",
    "<|im_end|>",
    "photon_grpc.v1.InferenceService",
)
_SMALL = (0, 1, 2, 3, 7, 40)
_FLOATS = (0.0, 0.5, 1.0, 2.0, -1.0)
_ODD_FLOATS = (math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-38, 3.5e-46)
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_INT64: 63,
    FieldDescriptor.CPPTYPE_UINT64: 64,
}
#: Of the scalars, so many are at a limit of their type.
_ODD = 0.1
_MOST_NESTED = 6


def fill(message: Message, draw: random.Random, depth: int = 0) -> Message:
    """Sets a few of its fields, and always an input; returns it."""
    for field in message.DESCRIPTOR.fields:
        wanted = field.containing_oneof is not None and field.containing_oneof.name == "input"
        if depth < _MOST_NESTED and (wanted or draw.random() < 0.15):
            _set(message, field, draw, depth)
    return message


def _set(message: Message, field: FieldDescriptor, draw: random.Random, depth: int) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_entry(target, field, draw)
    elif field.message_type is not None:
        for _ in range(draw.randrange(1, 4)) if field.is_repeated else (0,):
            child = target.add() if field.is_repeated else target
            child.SetInParent()
            fill(child, draw, depth + 1)
    elif field.is_repeated:
        target.extend(_scalar(field, draw) for _ in range(draw.randrange(5)))
    else:
        setattr(message, field.name, _scalar(field, draw))


def _set_entry(target: Any, field: FieldDescriptor, draw: random.Random) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    if value.message_type is None:
        target[_scalar(key, draw)] = _scalar(value, draw)


def _scalar(field: FieldDescriptor, draw: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            word = draw.choice(_WORDS)
            return word.encode() if field.type == FieldDescriptor.TYPE_BYTES else word
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return draw.choice(_ODD_FLOATS if draw.random() < _ODD else _FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return draw.choice(field.enum_type.values).number
        case kind:
            largest = (1 << _BITS[kind]) - 1
            return (
                draw.choice((largest, largest - 1, largest // 2 + 1)) if draw.random() < _ODD else draw.choice(_SMALL)
            )


def broken(message: bytes, draw: random.Random) -> bytes:
    """The bytes after up to two mutations."""
    for _ in range(draw.randrange(3)):
        message = draw.choice(_MUTATIONS)(message, draw)
    return message


def _noise(message: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(200))


def _flip(message: bytes, draw: random.Random) -> bytes:
    changed = bytearray(message)
    for _ in range(draw.randrange(1, 9)):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(message: bytes, draw: random.Random) -> bytes:
    return message[: draw.randrange(len(message) + 1)]


def _insert(message: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(message) + 1)
    return message[:at] + draw.randbytes(draw.randrange(1, 12)) + message[at:]


def _repeat(message: bytes, draw: random.Random) -> bytes:
    """The whole or a part of it again: fields that are set twice, lists that grow, messages that merge."""
    begin = draw.randrange(len(message) + 1)
    end = draw.randrange(begin, len(message) + 1)
    return message[:end] + message[begin:end] * draw.randrange(1, 50) + message[end:]


def _huge_length(message: bytes, draw: random.Random) -> bytes:
    """A field whose length says more than there is."""
    tag = draw.randrange(1, 16) << 3 | 2
    length = draw.choice(
        (b"\x7f", b"\xff\xff\xff\xff\x07", b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff" * 10 + b"\x01")
    )
    return message + bytes((tag,)) + length + draw.randbytes(draw.randrange(20))


def _huge_number(message: bytes, draw: random.Random) -> bytes:
    """A field, known or not, with a varint at its limits."""
    tag = draw.randrange(1, 16) << 3
    number = draw.choice((b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x08", b"\x80" * 12))
    return message + bytes((tag,)) + number


def _groups(message: bytes, draw: random.Random) -> bytes:
    """Groups or messages within each other, deeper than a parser follows."""
    tag = draw.randrange(1, 16) << 3
    depth = draw.choice((3, 99, 101, 5_000))
    return message + bytes((tag | 3,)) * depth + bytes((tag | 4,)) * draw.choice((0, depth))


def _unknown_field(message: bytes, draw: random.Random) -> bytes:
    """A field of a newer release, in the message or, where the draw hits a field, within it."""
    field = draw.choice((b"\xa0\x38\x01", b"\xa2\x38\x02hi", b"\xa3\x38\x08\x01\xa4\x38"))
    return message + (field if draw.random() < 0.5 else bytes((draw.randrange(1, 16) << 3 | 2, len(field))) + field)


_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _noise,
    _flip,
    _cut,
    _insert,
    _repeat,
    _huge_length,
    _huge_number,
    _groups,
    _unknown_field,
)
