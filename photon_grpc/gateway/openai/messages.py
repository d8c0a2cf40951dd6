"""Messages and tools of a chat in OpenAI's form as a ChatInput."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from photon_grpc.core.ask import ChatInput, ChatMessage, Tool, ToolChoice
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.gateway.calls.chat import TextPart, text_of, tool_of
from photon_grpc.gateway.calls.fields import converted


class _CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct, frozen=True):
    function: _CalledFunction
    id: str = ""
    type: str = "function"


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    #: Parts of answers that clients send back: without effect.
    refusal: str | None = None
    annotations: list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: None = None
    function_call: None = None


class _Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _Function
    type: str = "function"


class _NamedFunction(msgspec.Struct, frozen=True):
    name: str


class _NamedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: _NamedFunction


def chat_of(values: Mapping[str, Any]) -> ChatInput:
    """Return the chat of a body. Raise InvalidRequest, FeatureNotSupported."""
    messages = converted(values.get("messages", []), list[_Message], "messages")
    choice = values.get("tool_choice")
    tools = () if choice == "none" else tools_of(values.get("tools", []))
    arguments = values.get("chat_template_kwargs", {})
    if effort := values.get("reasoning_effort"):
        arguments = {"reasoning_effort": effort} | arguments
    return ChatInput(
        messages=tuple([_message(each, i) for i, each in enumerate(messages)]),
        template_args_json=msgspec.json.encode(arguments).decode() if arguments else "",
        add_generation_prompt=values.get("add_generation_prompt", True),
        tools=tools,
        tool_choice=tool_choice_of(choice) if tools or choice not in (None, "auto", "none") else None,
    )


def _message(message: _Message, index: int) -> ChatMessage:
    where = f"messages[{index}]"
    return ChatMessage(
        # Templates know the older name; the newer one means the same.
        "system" if message.role == "developer" else message.role,
        text_of(message.content, f"{where}.content"),
        message.name or "",
        message.tool_call_id or "",
        tool_calls=tuple(
            [
                ToolCall(i, call.function.name, call.function.arguments or "{}", call.id)
                for i, call in enumerate(message.tool_calls or ())
            ]
        ),
    )


def tools_of(tools: Any) -> tuple[Tool, ...]:
    """Return the tools. Raise InvalidRequest, FeatureNotSupported."""
    found = []
    for i, tool in enumerate(converted(tools, list[_Tool], "tools")):
        if tool.type != "function":
            path = f"tools[{i}].type"
            raise FeatureNotSupported(f"{path}: must be function, is {tool.type[:100]!r}", field=path)
        function = tool.function
        found.append(tool_of(function.name, function.description, function.parameters, function.strict))
    return tuple(found)


def tool_choice_of(choice: Any) -> ToolChoice | None:
    """Return the requirement to call tools. Raise InvalidRequest."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return ToolChoice()
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ToolChoice(converted(choice, _NamedChoice, "tool_choice").function.name)
    message = 'tool_choice: must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    raise InvalidRequest(message, field="tool_choice")
