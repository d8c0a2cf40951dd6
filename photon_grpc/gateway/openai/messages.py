"""Messages and tools of a chat in OpenAI's form as a ChatInput."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from photon_grpc.core.ask import ChatInput, ChatMessage, Tool, ToolChoice
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.gateway.calls.chat import TextPart, text_of, tool_of
from photon_grpc.gateway.calls.fields import converted, unknown_field


class _CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str = "{}"
    #: What OpenAI's client has read from the arguments, which it sends back.
    parsed_arguments: Any = None


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _CalledFunction | None = None
    id: str | None = None
    type: str = "function"
    #: Clients that gathered a stream send it back.
    index: int | None = None
    custom: Any = None


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    #: Stands for the content of an answer that has none.
    refusal: str | None = None
    #: Parts of answers that clients send back: without effect.
    annotations: list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    #: What OpenAI's client has read from the content.
    parsed: Any = None
    audio: None = None
    function_call: None = None


#: Fields without effect of a message, and of a part of its content.
_UNHEARD = ("reasoning_content", "reasoning", "annotations")
_UNHEARD_IN_PARTS = ("prompt_cache_breakpoint", "cache_control")
_EFFORT = "reasoning_effort"
_PART_FIELDS = frozenset({"type", "text", "refusal", *_UNHEARD_IN_PARTS})


class _Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _Function | None = None
    type: str = "function"
    custom: Any = None


class _NamedFunction(msgspec.Struct, frozen=True):
    name: str


class _NamedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: _NamedFunction


def chat_of(values: Mapping[str, Any], template_arguments: Collection[str] = ()) -> ChatInput:
    """Return the chat of a body for a template with these arguments. Raise InvalidRequest, FeatureNotSupported."""
    messages = converted(values.get("messages", []), list[_Message], "messages")
    choice = values.get("tool_choice")
    tools = () if choice == "none" else tools_of(values.get("tools", []))
    arguments = values.get("chat_template_kwargs", {})
    if _EFFORT in values and _EFFORT in template_arguments:
        arguments = {_EFFORT: values[_EFFORT]} | arguments
    return ChatInput(
        messages=tuple([_message(each, i) for i, each in enumerate(messages)]),
        template_args_json=msgspec.json.encode(arguments).decode() if arguments else "",
        add_generation_prompt=values.get("add_generation_prompt", True),
        tools=tools,
        tool_choice=tool_choice_of(choice, is_one=values.get("parallel_tool_calls") is False),
    )


def _message(message: _Message, index: int) -> ChatMessage:
    where = f"messages[{index}]"
    return ChatMessage(
        # Templates know the older name; the newer one means the same.
        "system" if message.role == "developer" else message.role,
        text_of(_parts(message, where), f"{where}.content", ("text", "refusal")),
        message.name or "",
        message.tool_call_id or "",
        tool_calls=tuple(
            [_call(call, i, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
        ),
    )


def _parts(message: _Message, where: str) -> str | list[TextPart] | None:
    """Return the content. Raise InvalidRequest for a part that has unknown fields or no text."""
    if not isinstance(message.content, list):
        return message.refusal if message.content is None else message.content
    return [_part(part, f"{where}.content[{i}]") for i, part in enumerate(message.content)]


def _part(part: Mapping[str, Any], where: str) -> TextPart:
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        return TextPart(kind if isinstance(kind, str) else "a part without a type")
    for name in part:
        if name not in _PART_FIELDS:
            raise unknown_field(name, dict.fromkeys(_PART_FIELDS), f"{where}.")
    return TextPart(kind, converted(part.get(kind), str, f"{where}.{kind}"))


def _call(call: _Call, index: int, where: str) -> ToolCall:
    if call.type != "function" or call.function is None:
        message = f"{where}.type: must be function, is {call.type[:100]!r}"
        raise FeatureNotSupported(message, field=f"{where}.type")
    return ToolCall(index, call.function.name, call.function.arguments or "{}", call.id or "")


def without_effect(values: Mapping[str, Any], template_arguments: Collection[str]) -> tuple[str, ...]:
    """Return the fields of a checked body, also of its messages, that have no effect with this template."""
    found = dict.fromkeys([name for name in (_EFFORT,) if name in values and name not in template_arguments])
    for message in values.get("messages", ()):
        found |= dict.fromkeys([f"messages[].{name}" for name in _UNHEARD if message.get(name)])
        if isinstance(content := message.get("content"), list):
            for part in content:
                found |= dict.fromkeys([f"messages[].content[].{name}" for name in _UNHEARD_IN_PARTS if name in part])
    return tuple(found)


def tools_of(tools: Any) -> tuple[Tool, ...]:
    """Return the tools. Raise InvalidRequest, FeatureNotSupported."""
    found = []
    for i, tool in enumerate(converted(tools, list[_Tool], "tools")):
        if tool.type != "function" or tool.function is None:
            path = f"tools[{i}].type"
            raise FeatureNotSupported(f"{path}: must be function, is {tool.type[:100]!r}", field=path)
        function = tool.function
        found.append(tool_of(function.name, function.description, function.parameters, function.strict))
    return tuple(found)


def tool_choice_of(choice: Any, *, is_one: bool) -> ToolChoice | None:
    """Return the requirement to call tools, or `is_one` tool. Raise InvalidRequest, FeatureNotSupported."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return ToolChoice(is_one=is_one)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return ToolChoice(converted(choice, _NamedChoice, "tool_choice").function.name)
    if kind in ("allowed_tools", "custom"):
        message = f"tool_choice.type: {kind} is not supported; send only the tools that may be called, as functions"
        raise FeatureNotSupported(message, field="tool_choice.type")
    message = 'tool_choice: must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    raise InvalidRequest(message, field="tool_choice")
