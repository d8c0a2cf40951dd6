"""The input of /v1/responses: items, tools and what they may become, as a ChatInput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from photon_grpc.core.ask import ChatInput, ConstraintAsk, Tool, ToolChoice
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.gateway.calls.chat import BodyChat, TextPart, Turns, effort_of, text_of, tool_of
from photon_grpc.gateway.calls.fields import converted, unknown_field
from photon_grpc.gateway.openai.options import response_format_of

_TEXTS = ("input_text", "output_text", "text")
#: Fields of a text that have no effect: of answers that clients send back, and for caches.
_UNHEARD_IN_PARTS = ("annotations", "logprobs", "prompt_cache_breakpoint")
_PART_FIELDS = dict.fromkeys(("type", "text", *_UNHEARD_IN_PARTS))
#: Fields of items that have no effect.
_UNHEARD = {
    "message": ("id", "status", "phase"),
    "function_call": ("id", "status", "caller", "namespace"),
    "function_call_output": ("id", "status", "caller", "name", "namespace"),
}


class _Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: str = "message"
    id: str | None = None
    status: str | None = None


class _MessageItem(_Item, frozen=True):
    role: str
    content: str | list[dict[str, Any]]
    phase: str | None = None


class _CallItem(_Item, frozen=True):
    call_id: str
    name: str
    arguments: str
    caller: Any = None
    namespace: str | None = None


class _OutputItem(_Item, frozen=True):
    call_id: str
    output: str | list[dict[str, Any]]
    caller: Any = None
    name: str | None = None
    namespace: str | None = None


class _NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    name: str = ""


class _FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    #: Reasoning is reported whole.
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


def chat_of(values: Mapping[str, Any], facts: ModelFacts) -> BodyChat:
    """Return the chat of a body for the model. Raise InvalidRequest, FeatureNotSupported."""
    turns = Turns()
    if instructions := values.get("instructions"):
        turns.say("system", instructions, "instructions")
    items = values.get("input", [])
    if isinstance(items, str):
        turns.say("user", items, "input")
    else:
        for i, item in enumerate(items):
            _add(turns, item, f"input[{i}]")
    unheard = () if isinstance(items, str) else tuple(dict.fromkeys(_without_effect(items)))
    arguments, ignored = _arguments(values.get("reasoning") or ReasoningOptions(), facts)
    choice = values.get("tool_choice")
    tools = _tools(values.get("tools", []), turns)
    chat = ChatInput(
        messages=turns.messages(),
        template_args_json=msgspec.json.encode(arguments).decode() if arguments else "",
        tools=() if choice == "none" else tools,
        tool_choice=_required(choice, is_one=values.get("parallel_tool_calls") is False),
    )
    return BodyChat(chat, ignored + unheard, turns.places)


def _add(turns: Turns, item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    match kind:
        case "message":
            message = converted(item, _MessageItem, where)
            text = _text(message.content, f"{where}.content")
            # Templates know the older name; the newer one means the same.
            role = "system" if message.role == "developer" else message.role
            turns.say(role, text, where, "" if role == "assistant" else None)
        case "function_call":
            call = converted(item, _CallItem, where)
            turns.call(call.name, call.arguments or "{}", call.call_id, f"{where}.arguments")
        case "function_call_output":
            output = converted(item, _OutputItem, where)
            turns.answer(output.call_id, _text(output.output, f"{where}.output"), where)
        case "reasoning":
            pass  # Chat templates leave out what the model thought before.
        case _:
            message = f"{where}: must be a message, function_call or function_call_output, is {str(kind)[:100]!r}"
            raise FeatureNotSupported(message, field=where)


def _text(content: str | Sequence[dict[str, Any]], where: str) -> str:
    """Return the text of an item. Raise InvalidRequest, also for a part without a text, and FeatureNotSupported."""
    if isinstance(content, str):
        return content
    return text_of([_part(part, f"{where}[{i}]") for i, part in enumerate(content)], where, _TEXTS)


def _part(part: Mapping[str, Any], where: str) -> TextPart:
    kind = part.get("type")
    if kind not in _TEXTS:
        return TextPart(kind if isinstance(kind, str) else "a part without a type")
    for name in part:
        if name not in _PART_FIELDS:
            raise unknown_field(name, _PART_FIELDS, f"{where}.")
    if "text" not in part:
        raise InvalidRequest(f"{where}.text: is missing", field=f"{where}.text")
    return TextPart(kind, converted(part["text"], str, f"{where}.text"))


def _without_effect(items: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the fields of checked items, also of their texts, that have no effect."""
    for item in items:
        yield from [f"input[].{name}" for name in _UNHEARD.get(item.get("type", "message"), ()) if item.get(name)]
        for field in ("content", "output"):
            if isinstance(parts := item.get(field), list):
                names = [name for part in parts for name in _UNHEARD_IN_PARTS if part.get(name)]
                yield from [f"input[].{field}[].{name}" for name in names]


def _arguments(reasoning: ReasoningOptions, facts: ModelFacts) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the variables of the chat template, and what of the reasoning's options has no effect."""
    found = effort_of(reasoning.effort, facts) if reasoning.effort else {}
    given = [name for name in reasoning.__struct_fields__ if getattr(reasoning, name) is not None]
    return found, tuple([f"reasoning.{name}" for name in given if name != "effort" or not found])


def _tools(tools: list[dict[str, Any]], turns: Turns) -> tuple[Tool, ...]:
    return tuple([_tool(tool, f"tools[{i}]", turns) for i, tool in enumerate(tools)])


def _tool(tool: dict[str, Any], where: str, turns: Turns) -> Tool:
    if tool.get("type") != "function":
        message = f"{where}.type: must be function, is {str(tool.get('type'))[:100]!r}; this server runs no tools"
        raise FeatureNotSupported(message, field=f"{where}.type")
    found = converted(tool, _FunctionTool, where)
    turns.places[f"chat.{where}.parameters_json"] = f"{where}.parameters"
    return tool_of(found.name, found.description, found.parameters, found.strict)


def _required(choice: Any, *, is_one: bool) -> ToolChoice | None:
    """Return the requirement to call tools, or `is_one` tool. Raise InvalidRequest, FeatureNotSupported."""
    match choice:
        case None | "auto" | "none":
            return None
        case "required":
            return ToolChoice(is_one=is_one)
        case {"type": "function"}:
            if name := converted(choice, _NamedTool, "tool_choice").name:
                return ToolChoice(name)
            raise InvalidRequest("tool_choice.name: is missing", field="tool_choice.name")
        case {"type": str(kind)}:
            message = f"tool_choice.type: must be function, is {kind[:100]!r}; send only the tools that may be called"
            raise FeatureNotSupported(message, field="tool_choice.type")
    message = 'tool_choice: must be "none", "auto", "required" or {"type": "function", "name": …}'
    raise InvalidRequest(message, field="tool_choice")


def constraint_of(text: TextOptions | None) -> ConstraintAsk | None:
    """Return the form of the output. Raise InvalidRequest, FeatureNotSupported."""
    if text is None:
        return None
    if text.verbosity not in (None, "medium"):
        raise FeatureNotSupported("text.verbosity: ask for it in a message", field="text.verbosity")
    form = text.format or TextFormat("text")
    return response_format_of(form.type, form.schema, "text.format")
