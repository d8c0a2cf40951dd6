"""The part of a prompt that all calls of a method share: what the method does, and the types of both messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor

from photon_grpc.server.typed.message_graph import ANY_FORM, ONE_VALUE, fields_of, is_map, value_of, value_type

_F = FieldDescriptor
_NUMBERS = {
    **dict.fromkeys((_F.TYPE_DOUBLE, _F.TYPE_FLOAT), "number"),
    _F.TYPE_BOOL: "true or false",
    _F.TYPE_STRING: "text",
    _F.TYPE_BYTES: "base64",
}
_MAX_ENUM_NAMES = 64
#: Messages whose JSON is not made of their fields.
_ONE_LINE = frozenset({"google.protobuf.Any", *ONE_VALUE, *ANY_FORM})


class _Detail(NamedTuple):
    """The size of a prompt: characters of each comment, and the number of types of each message."""

    comment_chars: int
    types: int


#: From all to almost nothing; the first that fits the model's context is taken.
_DETAILS = (_Detail(10**6, 10**6), _Detail(160, 10**6), _Detail(60, 32), _Detail(0, 16), _Detail(0, 4), _Detail(0, 1))


def shared_prompt(
    method: MethodDescriptor,
    comments: Mapping[str, str],
    is_hidden: Callable[[FieldDescriptor], bool],
    *,
    is_stream: bool,
    max_chars: int,
) -> str:
    """Return the text, with as much of the comments and types as `max_chars` hold, and never a hidden field's name.

    It is longer only where the shortest one is.
    """
    text = ""
    for detail in _DETAILS:
        text = "\n".join(_lines(method, comments, is_hidden, is_stream, detail))
        if len(text) <= max_chars:
            break
    return text


def _lines(
    method: MethodDescriptor,
    comments: Mapping[str, str],
    is_hidden: Callable[[FieldDescriptor], bool],
    is_stream: bool,
    detail: _Detail,
) -> Iterator[str]:
    service: Any = method.containing_service
    yield f"You answer calls of the method {method.name} of the service {service.full_name}."
    for each in (service.full_name, method.full_name):
        if text := _cut(comments.get(each, ""), detail.comment_chars):
            yield text
    yield ""
    yield f"The request is a {method.input_type.name} as JSON:"
    yield from _types(method.input_type, comments, is_hidden, detail)
    yield ""
    if is_stream:
        yield f"Answer with messages {method.output_type.name} as JSON, each on a line of its own, and nothing else:"
    else:
        yield f"Answer with one {method.output_type.name} as JSON, and nothing else:"
    yield from _types(method.output_type, comments, is_hidden, detail)


def _types(
    root: Descriptor, comments: Mapping[str, str], is_hidden: Callable[[FieldDescriptor], bool], detail: _Detail
) -> Iterator[str]:
    """Yield the lines of a message and of those within it, nearest first, each once."""
    waiting, seen = [root], {root.full_name}
    for message in waiting:  # grows
        yield _with_comment(message.name, comments.get(message.full_name, ""), detail)
        for field in fields_of(message):
            if is_hidden(field):
                continue
            choice = [each.json_name for each in _choice(field) if not is_hidden(each)]
            if len(choice) > 1 and choice[0] == field.json_name:
                yield f"- only one of {', '.join(choice)}:"
            name = f"- {field.json_name}: {_type(field)}"
            yield _with_comment(name, comments.get(field.full_name, ""), detail)
            enum = value_of(field).enum_type
            if enum is not None and enum.full_name not in seen and detail.comment_chars:
                seen.add(enum.full_name)
                yield from _values(enum, comments, detail)
            child = value_type(field)
            if child is None or child.full_name in seen or child.full_name in _ONE_LINE:
                continue
            if len(waiting) < detail.types:
                seen.add(child.full_name)
                waiting.append(child)


def _choice(field: FieldDescriptor) -> list[FieldDescriptor]:
    """Return the fields of the oneof that `field` is in."""
    group = field.containing_oneof
    return [] if group is None else list(group.fields)


def _values(enum: EnumDescriptor, comments: Mapping[str, str], detail: _Detail) -> Iterator[str]:
    """Yield the comments of an enum's values."""
    for value in enum.values[:_MAX_ENUM_NAMES]:
        if comment := comments.get(f"{enum.full_name}.{value.name}", ""):
            yield _with_comment(f"  - {value.name}", comment, detail)


def _type(field: FieldDescriptor) -> str:
    value = value_of(field)
    if value.message_type is not None:
        name = value.message_type.name
    elif value.enum_type is not None:
        name = " | ".join([each.name for each in value.enum_type.values][:_MAX_ENUM_NAMES])
    else:
        name = _NUMBERS.get(value.type, "integer")
    if is_map(field):
        return f"map of {name}"
    return f"list of {name}" if field.is_repeated else name


def _with_comment(line: str, comment: str, detail: _Detail) -> str:
    comment = _cut(comment, detail.comment_chars)
    return f"{line}. {comment}" if comment else line


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…" if num_chars else ""
