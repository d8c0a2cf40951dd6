"""A count of a message's fields on the wire, before it is parsed.

Without it thirty megabytes of empty messages would become gigabytes of objects. What parsing costs beyond this is
bounded by copying bytes and checking UTF-8.
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor

from photon_grpc.errors import InvalidRequest, MalformedMessage

#: Bytes of a list of numbers: far more than the ids of any context, and parsed in about 50 ms.
MAX_LIST_BYTES = 2**22
#: A conversation has three or four fields per message; a list of numbers counts as one field.
MAX_FIELDS = 2**16
#: Nesting of messages and groups; protobuf's own limit.
_MAX_DEPTH = 100
_VARINT, _FIXED64, _LENGTH, _GROUP, _END_GROUP, _FIXED32 = range(6)
_MAX_TAG = 2**32

#: The tag of a field 1 that is a message or a string.
_FIRST_TAG = 0x0A

#: Number -> (name, the same table for its message) of fields that hold messages; (name, None) for lists of numbers.
_Nested = dict[int, tuple[str, Any]]
_PLAIN = ("", None)


def count_fields(message: bytes, descriptor: Descriptor, limit: int = MAX_FIELDS) -> int:
    """Count the fields of `message` and of all messages in it, including unknown ones.

    Raise InvalidRequest naming the field that exceeds `limit`, or a list that is too long; MalformedMessage if the
    bytes are not a message.
    """
    try:
        return _count(message, descriptor, limit)
    except IndexError:
        raise _malformed() from None


def _count(message: bytes, descriptor: Descriptor, limit: int) -> int:
    # One loop without recursion and with few calls, since it reads untrusted bytes.
    nested = _nested_of(descriptor)
    position, end, group, count = 0, len(message), 0, 0
    above: list[tuple[int, int, _Nested, str]] = []
    while True:
        if position >= end:
            if position > end or group:
                raise _malformed()
            if not above:
                return count
            end, group, nested, _ = above.pop()
            continue
        tag = message[position]
        position += 1
        if tag >= 0x80:
            tag, position = _varint(message, position - 1)
        number, kind = tag >> 3, tag & 7
        if not number or tag >= _MAX_TAG:
            raise _malformed()
        if kind == _END_GROUP:
            if number != group:
                raise _malformed()
            end, group, nested, _ = above.pop()
            continue
        count += 1
        if count > limit:
            raise _too_many([holder for *_, holder in above], number, descriptor, limit)
        if kind == _LENGTH:
            length = message[position]
            position += 1
            if length >= 0x80:
                length, position = _varint(message, position - 1)
            if length > end - position:
                raise _malformed()
            name, inner = nested.get(number, _PLAIN)
            if inner is not None:
                above.append((end, group, nested, name))
                end, group, nested = position + length, 0, inner
            elif name and length > MAX_LIST_BYTES:
                raise _too_long(above, name, length)
            else:
                position += length
        elif kind == _VARINT:
            _, position = _varint(message, position)
        elif kind == _FIXED32:
            position += 4
        elif kind == _FIXED64:
            position += 8
        elif kind == _GROUP:
            above.append((end, group, nested, str(number)))
            group, nested = number, {}
        else:
            raise _malformed()
        if len(above) > _MAX_DEPTH:
            raise _malformed()


def first_request_id(action: bytes) -> str:
    """Return the request id at the beginning of an unparsed MultiplexGenerateRequest; "" if there is none."""
    try:
        for _ in ("generate", "request_id"):
            if action[0] != _FIRST_TAG:
                return ""
            length, begin = _varint(action, 1)
            action = action[begin : begin + length]
    except (IndexError, MalformedMessage):
        return ""
    return action.decode("ascii", "ignore")[:128]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number at `position`, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _malformed()


@lru_cache(maxsize=256)
def _nested_of(descriptor: Descriptor) -> _Nested:
    tables: dict[str, _Nested] = {}

    def table(message: Descriptor) -> _Nested:
        if message.full_name not in tables:
            nested = tables[message.full_name] = {}
            for field in message.fields:
                if field.message_type is not None:
                    nested[field.number] = (field.name, table(field.message_type))
                elif field.is_packed:
                    nested[field.number] = (field.name, None)
        return tables[message.full_name]

    return table(descriptor)


def _too_many(holders: list[str], number: int, descriptor: Descriptor | None, limit: int) -> InvalidRequest:
    for holder in holders:
        field = descriptor.fields_by_name.get(holder) if descriptor else None
        descriptor = field.message_type if field else None
    known = descriptor.fields_by_number.get(number) if descriptor else None
    path = ".".join([*holders, known.name if known else str(number)])
    message = f"with {path} the message has {limit + 1} fields or more; {limit} are allowed"
    return InvalidRequest(message, field=path, needed=limit + 1, limit=limit)


def _too_long(above: list[tuple[int, int, _Nested, str]], name: str, num_bytes: int) -> InvalidRequest:
    path = _path(above, name)
    message = f"{path} has {num_bytes} bytes of numbers; {MAX_LIST_BYTES} are allowed"
    return InvalidRequest(message, field=path, needed=num_bytes, limit=MAX_LIST_BYTES)


def _path(above: list[tuple[int, int, _Nested, str]], name: str) -> str:
    return ".".join([*(holder for _, _, _, holder in above), name])


def _malformed() -> MalformedMessage:
    return MalformedMessage("the bytes are not a message of this method")
