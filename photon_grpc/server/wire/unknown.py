"""Refusal of requests with fields that this release does not know.

Protobuf keeps such fields aside, so that a newer caller's parameter would have no effect and no error. A field counts
as unknown in any message of a request, also if its number is known and its wire type is not. An unknown enum value is
not an unknown field; no request has enums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from photon_grpc import __version__
from photon_grpc.admin.v1 import admin_pb2
from photon_grpc.errors import FeatureNotSupported
from photon_grpc.v1 import inference_pb2, model_pb2

Parse = Callable[[bytes], Any]

#: Requests of other packages, such as health checks and a user's own services, keep protobuf's rule.
_PACKAGES = frozenset(each.DESCRIPTOR.package for each in (inference_pb2, model_pb2, admin_pb2))
#: Up to this size a message is written again to find unknown fields, in a few microseconds. Larger ones, which are
#: parsed in a thread, are searched instead, since a copy would hold the interpreter for milliseconds.
_SMALL_BYTES = 2**14
#: Messages within a refused one that are searched on the event loop, in a few milliseconds.
_MAX_SEARCHED = 2**10
#: The same in the parsing thread. Searching more takes longer than comparing sizes, which names no path.
_MAX_SEARCHED_IN_THREAD = 2**13
_LENGTH = 2
_MAX_KEY_CHARS = 63
_REMEDY = f"to this release ({__version__}); upgrade the server first"


def refusing_unknown(parse: Parse) -> Parse:
    """Return a parser that raises FeatureNotSupported for an unknown field; `parse` itself for others' messages."""
    empty = parse(b"")
    if not isinstance(empty, Message) or empty.DESCRIPTOR.file.package not in _PACKAGES:
        return parse

    def parse_known(data: bytes) -> Any:
        message = parse(data)
        if len(data) > _SMALL_BYTES:
            messages = _messages(message, "")
            refusal = _search(islice(messages, _MAX_SEARCHED_IN_THREAD)) or _compare_sizes(message, messages)
        elif _is_whole_without_unknown(message, data) or parse(data).ByteSize() == message.ByteSize():
            refusal = None
        else:
            refusal = _search(islice(_messages(parse(data), ""), _MAX_SEARCHED)) or _without_path()
        if refusal is not None:
            refusal.is_of_model = False
            raise refusal
        return message

    return parse_known


def _is_whole_without_unknown(message: Message, data: bytes) -> bool:
    """Discard unknown fields; return whether the rest is written as `data`. It is not if `data` is written otherwise.

    Most libraries write a message as ours does.
    """
    message.DiscardUnknownFields()
    return message.SerializeToString() == data


def _compare_sizes(request: Message, unsearched: Iterator[tuple[str, Message]]) -> FeatureNotSupported | None:
    """Return the refusal of an unknown field in the messages that were not searched."""
    if next(unsearched, None) is None:
        return None
    num_bytes = request.ByteSize()
    request.DiscardUnknownFields()
    return None if request.ByteSize() == num_bytes else _without_path()


def _without_path() -> FeatureNotSupported:
    return FeatureNotSupported(f"a field is not known {_REMEDY}")


def _search(messages: Iterable[tuple[str, Message]]) -> FeatureNotSupported | None:
    """Return the refusal of the first unknown field of these messages themselves."""
    for path, message in messages:
        for unknown in _unknown_in(message):
            return _unknown(path, message, unknown)
    return None


def _messages(message: Message, path: str) -> Iterator[tuple[str, Message]]:
    """Yield the message and all messages in it, each with its path."""
    yield path, message
    for name, is_repeated, is_map in _holders(message.DESCRIPTOR):
        if not is_repeated:
            if message.HasField(name):
                yield from _messages(getattr(message, name), _joined(path, name))
            continue
        values = getattr(message, name)
        if not values:
            continue
        keys = values if is_map else range(len(values))
        for key in keys:
            yield from _messages(values[key], f"{_joined(path, name)}[{_shown(key)}]")


@lru_cache(maxsize=256)
def _holders(descriptor: Descriptor) -> tuple[tuple[str, bool, bool], ...]:
    """Return name, is_repeated and is_map of fields that hold messages. Reading others would copy their texts."""
    return tuple(
        (field.name, field.is_repeated, _is_map(field))
        for field in descriptor.fields
        if field.message_type is not None and not _is_plain_map(field)
    )


def _unknown(path: str, message: Message, unknown: Any) -> FeatureNotSupported:
    number = unknown.field_number
    known: Any = message.DESCRIPTOR.fields_by_number.get(number)
    within = f" in {path}" if path else ""
    if known is None:
        text = f"field {number}{within} is not known {_REMEDY}"
        return FeatureNotSupported(text, field=_joined(path, str(number)))
    path = _joined(path, known.name)
    if _is_map(known) and unknown.wire_type == _LENGTH:
        # The parser keeps a map's entry aside as a whole if it has an unknown field.
        entry: Any = GetMessageClass(known.message_type).FromString(unknown.data)
        for within_entry in _unknown_in(entry):
            return _unknown(f"{path}[{_shown(entry.key)}]", entry, within_entry)
    text = f"field {number} ({known.name}){within} has another type in release {__version__}; compare the protos"
    return FeatureNotSupported(text, field=path)


def _unknown_in(message: Message) -> Iterable[Any]:
    """Return the unknown fields of the message itself."""
    return UnknownFieldSet(message)  # type: ignore[return-value]  # its stub lacks __iter__


def _is_plain_map(field: Any) -> bool:
    return _is_map(field) and field.message_type.fields_by_name["value"].message_type is None


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _shown(key: Any) -> str:
    return json.dumps(key[:_MAX_KEY_CHARS]) if isinstance(key, str) else str(key)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
