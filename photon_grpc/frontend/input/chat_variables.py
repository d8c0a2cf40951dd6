"""The tools and messages of a chat as chat templates expect them, which is the form that transformers documents."""

from __future__ import annotations

import re
from typing import Any

from photon_grpc.core.ask import ChatInput, ChatMessage, Tool
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.frontend.input.chat_json import parsed

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
#: Characters of a caller's name in an error message.
_MAX_NAME = 100


def check_tools(chat: ChatInput) -> None:
    """Check the tools but for their parameters. Raise InvalidRequest, FeatureNotSupported."""
    if chat.tools_json:
        raise _invalid("chat.tools", "tools_json is set, too; set one of them")
    names: set[str] = set()
    for i, tool in enumerate(chat.tools):
        field = f"chat.tools[{i}]"
        _check_name(tool.name, names, f"{field}.name")
        names.add(tool.name)
        if tool.strict and chat.tool_choice is None:
            raise FeatureNotSupported(
                f"{field}.strict: without tool_choice no schema constrains a call; set tool_choice, or leave strict "
                "unset",
                field=f"{field}.strict",
            )


def _check_name(name: str, others: set[str], field: str) -> None:
    if not _NAME.fullmatch(name):
        rule = "must be 1 to 64 of a-z, A-Z, 0-9, _, - and dots"
        raise _invalid(field, f"{rule}, is {name[:_MAX_NAME]!r} with {len(name)} characters")
    if name in others:
        raise _invalid(field, f"there is another tool {name!r}; give each tool its own name")


def tool_variables(chat: ChatInput) -> list[Any]:
    """Return the template's tools. Raise InvalidRequest."""
    if chat.tools:
        return [_tool(tool, f"chat.tools[{i}]") for i, tool in enumerate(chat.tools)]
    tools: list[Any] = parsed(chat.tools_json, list, "chat.tools_json")
    return tools


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    # Templates look for `type` and `properties` even if a tool takes no arguments.
    parameters = parsed(tool.parameters_json, dict, f"{field}.parameters_json") if tool.parameters_json else None
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": {"type": "object", "properties": {}} if parameters is None else parameters,
    }
    return {"type": "function", "function": function}


def message_variables(message: ChatMessage, index: int) -> dict[str, Any]:
    """Return a message of the template. Raise InvalidRequest."""
    if not message.role:
        raise InvalidRequest("a message needs a role", field=f"chat.messages[{index}].role")
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls or message.tool_calls_json:
        fields["tool_calls"] = _tool_calls(message, f"chat.messages[{index}].tool_calls")
    return fields


def _tool_calls(message: ChatMessage, field: str) -> list[Any]:
    if not message.tool_calls:
        calls: list[Any] = parsed(message.tool_calls_json, list, f"{field}_json")
        return calls
    if message.tool_calls_json:
        raise _invalid(field, "tool_calls_json is set, too; set one of them")
    return [_tool_call(call, f"{field}[{i}]") for i, call in enumerate(message.tool_calls)]


def _tool_call(call: ToolCall, field: str) -> dict[str, Any]:
    if not call.name:
        raise _invalid(f"{field}.name", "must not be empty")
    if not call.arguments_json:
        raise _invalid(f"{field}.arguments_json", "must be a JSON object; {} if there are no arguments")
    arguments = parsed(call.arguments_json, dict, f"{field}.arguments_json")
    function = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **function} if call.id else function


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {problem}", field=field)
