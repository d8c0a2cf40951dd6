"""Messages and tools of a chat, written into a ChatInput.

Beside the fields of the protos, dicts may have the form of OpenAI's API, and tool calls may be those of an output.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from photon_grpc.client.field_values import write_field
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import InvalidRequest
from photon_grpc.v1 import inference_pb2 as pb

_FIELDS = tuple(pb.ChatMessage.DESCRIPTOR.fields_by_name)
#: Fields whose None means that they are unset.
_OPTIONAL = frozenset(_FIELDS) - {"role", "content"}


def write_messages(chat: pb.ChatInput, messages: Sequence[Mapping[str, Any]]) -> None:
    """Add messages to a chat. Raise InvalidRequest."""
    for index, message in enumerate(messages):
        _write_message(chat.messages.add(), message, f"chat.messages[{index}]")


def write_tools(chat: pb.ChatInput, tools: Any) -> None:
    """Add tools to a chat. Raise InvalidRequest."""
    for index, tool in enumerate(_listed(tools, "chat.tools")):
        _write_tool(chat.tools.add(), tool, f"chat.tools[{index}]")


def _write_message(target: pb.ChatMessage, message: Mapping[str, Any], path: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} is not a message but {type(message).__name__}", field=path)
    if "role" not in message:
        raise InvalidRequest(f"{path} has no role", field=f"{path}.role")
    _check_keys(message, _FIELDS, path)
    if isinstance(message.get("content"), list | tuple):
        _check_one(message, ("content", "parts"), path)
    for key, value in message.items():
        if value is None and (key in _OPTIONAL or (key == "content" and message.get("tool_calls"))):
            continue
        if key == "tool_calls":
            for index, call in enumerate(_listed(value, f"{path}.{key}")):
                _write_call(target.tool_calls.add(), call, f"{path}.{key}[{index}]")
        elif key == "parts" or (key == "content" and isinstance(value, list | tuple)):
            for index, part in enumerate(_listed(value, f"{path}.{key}")):
                _write_part(target.parts.add(), part, f"{path}.{key}[{index}]")
        else:
            write_field(target, key, value, path)


def _write_part(target: pb.ContentPart, part: Any, path: str) -> None:
    """Write `{"type": "text", "text": "..."}`, with or without its type."""
    _check_type(part, "text", path)
    _check_keys(part, ("type", "text"), path)
    write_field(target, "text", part.get("text"), path)


def _write_call(target: pb.ToolCall, call: Any, path: str) -> None:
    """Write a ToolCall, its fields, or `{"id": ..., "function": {"name": ..., "arguments": ...}}`."""
    if isinstance(call, ToolCall):
        call = {"id": call.id, "name": call.name, "arguments_json": call.arguments_json}
    function, where = _function(call, ("id", "index"), path)
    _check_keys(function, ("id", "index", "type", "name", "arguments", "arguments_json"), where)
    if call.get("id") is not None:
        write_field(target, "id", call["id"], path)
    write_field(target, "name", function.get("name"), where)
    _write_json(target, "arguments_json", function, where)


def _write_tool(target: pb.Tool, tool: Any, path: str) -> None:
    """Write the fields of a Tool, or `{"function": {"name": ..., "parameters": {...}}}`."""
    function, where = _function(tool, (), path)
    _check_keys(function, ("type", "name", "description", "parameters", "parameters_json", "strict"), where)
    write_field(target, "name", function.get("name"), where)
    for key in ("description", "strict"):
        if function.get(key) is not None:
            write_field(target, key, function[key], where)
    _write_json(target, "parameters_json", function, where)


def _function(value: Any, beside: Collection[str], path: str) -> tuple[Mapping[str, Any], str]:
    """Return the function within a tool or a call, which may be the whole, and its path."""
    _check_type(value, "function", path)
    if "function" not in value:
        return value, path
    _check_keys(value, ("type", "function", *beside), path)
    _check_object(value["function"], f"{path}.function")
    return value["function"], f"{path}.function"


def _write_json(target: Message, field: str, function: Mapping[str, Any], path: str) -> None:
    """Write a field that is JSON, given as text or, without the end of its name, also as an object."""
    name = field.removesuffix("_json")
    _check_one(function, (field, name), path)
    value = function.get(name) if function.get(field) is None else function[field]
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path}.{name}: is not JSON: {error}", field=f"{path}.{name}") from None
    if value is not None:
        write_field(target, field, value, path)


def _check_type(value: Any, expected: str, path: str) -> None:
    _check_object(value, path)
    if value.get("type", expected) != expected:
        message = f"{path} is of type {reprlib.repr(value['type'])}; only {expected!r} is supported"
        raise InvalidRequest(message, field=f"{path}.type")


def _check_keys(value: Mapping[str, Any], known: Collection[str], path: str) -> None:
    for key in value:
        if key not in known:
            raise InvalidRequest(f"{path} has no {key!r}; it may have {', '.join(known)}", field=f"{path}.{key}")


def _check_one(value: Mapping[str, Any], keys: tuple[str, str], path: str) -> None:
    """Refuse a value with both keys, which stand for one field."""
    first, second = keys
    if value.get(first) is not None and value.get(second) is not None:
        field = f"{path}.{second}"
        raise InvalidRequest(f"{field}: {first} is set, too; set one of them", field=field)


def _check_object(value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{path} is not an object but {type(value).__name__}", field=path)


def _listed(value: Any, path: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{path} is not a list but {type(value).__name__}", field=path)
    return value
