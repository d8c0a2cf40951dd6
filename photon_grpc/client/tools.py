"""Tools whose arguments are messages: their definitions for a chat, and the calls read back."""

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

#: As proto3 JSON writes them.
_WELL_KNOWN: dict[str, dict[str, Any]] = {
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    "google.protobuf.Duration": {"type": "string"},
    "google.protobuf.FieldMask": {"type": "string"},
    "google.protobuf.Struct": {"type": "object"},
    "google.protobuf.ListValue": {"type": "array"},
    "google.protobuf.Value": {},
}


def tools_json(tools: Mapping[type[Message], str]) -> str:
    """For the option of that name: message class -> what its tool does. A tool is named like its message, its arguments
    like the fields in JSON. Raise InvalidRequest for a type that holds itself."""
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
    """Return the call as a message of the class that it names. Raise MessageMismatch where it names none of them, or
    its arguments are none of its fields."""
    by_name = {each.DESCRIPTOR.name: each for each in types}
    if call.name not in by_name:
        raise MessageMismatch(f"the call is of {call.name!r}, not of {', '.join(by_name)}")
    try:
        return parse_message(call.arguments_json.encode(), by_name[call.name])
    except ParseError as error:
        raise MessageMismatch(f"the arguments of {call.name} are not a message of its type: {error}") from error


def _object(descriptor: Any, *around: str) -> dict[str, Any]:
    name = descriptor.full_name
    if name in around:
        raise InvalidRequest(f"{name} holds itself; a tool's arguments have an end", field="chat.tools_json")
    fields = {field.json_name: _field(field, (*around, name)) for field in descriptor.fields}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _field(field: FieldDescriptor, around: tuple[str, ...]) -> dict[str, Any]:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _value(message.fields_by_name["value"], around)}
    one = _value(field, around)
    return {"type": "array", "items": one} if field.is_repeated else one


def _value(field: FieldDescriptor, around: tuple[str, ...]) -> dict[str, Any]:
    if field.message_type is not None:
        name = field.message_type.full_name
        if name.startswith("google.protobuf.") and name.endswith("Value") and name not in _WELL_KNOWN:
            return _value(field.message_type.fields_by_name["value"], around)
        return _WELL_KNOWN.get(name) or _object(field.message_type, *around)
    if field.enum_type is not None:
        return {"enum": [value.name for value in field.enum_type.values]}
    return {"type": _SCALARS.get(field.cpp_type, "integer")}
