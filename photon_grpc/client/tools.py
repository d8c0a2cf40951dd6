"""Tools whose arguments are messages: definitions for a chat, and reading of the calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseError
from google.protobuf.message import Message

from photon_grpc.client.message_type import MessageMismatch, parse_message
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import InvalidRequest

_SCALARS: dict[int, str] = {
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
}

#: Schemas of the JSON that proto3 writes for well-known types.
_WELL_KNOWN: dict[str, dict[str, Any]] = {
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    "google.protobuf.Duration": {"type": "string"},
    "google.protobuf.FieldMask": {"type": "string"},
    "google.protobuf.Struct": {"type": "object"},
    "google.protobuf.ListValue": {"type": "array"},
    "google.protobuf.Value": {},
}


def tools_json(tools: Mapping[type[Message], str]) -> str:
    """Return the option `tools_json` for tools, given as message class -> description.

    A tool has the name of its message, and its arguments have the JSON names of the fields. Raise InvalidRequest for a
    recursive type.
    """
    return json.dumps(
        [
            {
                "type": "function",
                "function": {"name": each.DESCRIPTOR.name, "description": text, "parameters": _object(each.DESCRIPTOR)},
            }
            for each, text in tools.items()
        ]
    )


def read_tool_message(call: ToolCall, *types: type[Message]) -> Message:
    """Return the call as a message of the class that it names. Raise MessageMismatch if none of `types` fits."""
    by_name = {each.DESCRIPTOR.name: each for each in types}
    if call.name not in by_name:
        raise MessageMismatch(f"the call is of {call.name!r}, not of {', '.join(by_name)}")
    try:
        return parse_message(call.arguments_json.encode(), by_name[call.name])
    except ParseError as error:
        raise MessageMismatch(f"the arguments of {call.name} are not a message of its type: {error}") from error


def _object(descriptor: Any, *outer: str) -> dict[str, Any]:
    name = descriptor.full_name
    if name in outer:
        raise InvalidRequest(f"{name} is recursive, which a tool's arguments must not be", field="chat.tools_json")
    fields = {field.json_name: _field(field, (*outer, name)) for field in descriptor.fields}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _field(field: FieldDescriptor, outer: tuple[str, ...]) -> dict[str, Any]:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _value(message.fields_by_name["value"], outer)}
    value = _value(field, outer)
    return {"type": "array", "items": value} if field.is_repeated else value


def _value(field: FieldDescriptor, outer: tuple[str, ...]) -> dict[str, Any]:
    if field.message_type is not None:
        name = field.message_type.full_name
        if name.startswith("google.protobuf.") and name.endswith("Value") and name not in _WELL_KNOWN:
            return _value(field.message_type.fields_by_name["value"], outer)
        return _WELL_KNOWN.get(name) or _object(field.message_type, *outer)
    if field.enum_type is not None:
        return {"enum": [value.name for value in field.enum_type.values]}
    return {"type": _SCALARS.get(field.cpp_type, "integer")}
