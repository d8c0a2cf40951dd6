"""Messages, their blocks and tools in Anthropic's form as a ChatInput."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from photon_grpc.core.ask import ChatInput, Tool, ToolChoice
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.gateway.calls.chat import BodyChat, Turns, effort_of, not_read, tool_of
from photon_grpc.gateway.calls.fields import converted

#: Claude Code begins its system prompt with a block for Anthropic's accounts. It changes with every call, so that no
#: prompt would share its prefix with another.
_BILLING = "x-anthropic-billing-header:"
_CACHE_CONTROL = "cache_control"
#: Blocks of one message, and messages of one speaker in a row, are a message with this between them.
_JOINT = "\n"


class _Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: str
    cache_control: Any = None


class _Text(_Block, frozen=True):
    text: str
    citations: Any = None


class _ToolUse(_Block, frozen=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: str | None = None


class _ToolResult(_Block, frozen=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


class _Thinking(_Block, frozen=True):
    thinking: str
    signature: str = ""


class _RedactedThinking(_Block, frozen=True):
    data: str


class _AnthropicMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]


class _CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    #: A call is sent whole in any case.
    eager_input_streaming: bool | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


_KINDS: dict[str, dict[Any, type[_Block]]] = {
    "system": {"text": _Text},
    "user": {"text": _Text, "tool_result": _ToolResult},
    "assistant": {
        "text": _Text,
        "tool_use": _ToolUse,
        "thinking": _Thinking,
        "redacted_thinking": _RedactedThinking,
    },
}


def chat_of(values: Mapping[str, Any], facts: ModelFacts) -> BodyChat:
    """Return the chat of a body for the model. Raise InvalidRequest, FeatureNotSupported."""
    reader = _ChatReader()
    reader.system(values.get("system", ""))
    for i, message in enumerate(converted(values.get("messages", []), list[_AnthropicMessage], "messages")):
        reader.message(message, f"messages[{i}]")
    choice = values.get("tool_choice") or Choice("auto")
    tools = reader.tools(values.get("tools", []))
    arguments = reader.arguments(values, facts)
    chat = ChatInput(
        messages=reader.turns.messages(),
        template_args_json=msgspec.json.encode(arguments).decode() if arguments else "",
        tools=() if choice.type == "none" else tools,
        tool_choice=_required(choice),
    )
    return BodyChat(chat, tuple(reader.ignored), reader.turns.places)


class _ChatReader:
    """Reads the parts of one body."""

    def __init__(self) -> None:
        self.turns = Turns()
        #: Names in the order in which they came.
        self.ignored: dict[str, None] = {}

    def system(self, content: str | list[dict[str, Any]]) -> None:
        texts = []
        for text in self._texts(content, "system"):
            if text.startswith(_BILLING):
                self.ignored["system.x-anthropic-billing-header"] = None
            elif text:
                texts.append(text)
        if texts:
            self.turns.say("system", _JOINT.join(texts), "system")

    def message(self, message: _AnthropicMessage, where: str) -> None:
        role, content = message.role, message.content
        if role not in _KINDS:
            raise InvalidRequest(f"{where}.role: must be user, assistant or system", field=f"{where}.role")
        if role == "system":
            self.turns.say(role, _JOINT.join(self._texts(content, f"{where}.content")), where)
        elif isinstance(content, str):
            self._say(role, content, where)
        else:
            for i, block in enumerate(content):
                self._block(self._read(block, role, f"{where}.content[{i}]"), role, f"{where}.content[{i}]")
            if not content:
                self._say(role, "", where)

    def tools(self, tools: list[dict[str, Any]]) -> tuple[Tool, ...]:
        return tuple([self._tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)])

    def arguments(self, values: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
        """Return the variables of the chat template."""
        found: dict[str, Any] = {}
        if (config := values.get("output_config")) is not None and config.effort is not None:
            found = effort_of(config.effort, facts)
            if not found:
                self.ignored["output_config.effort"] = None
        if (thinking := values.get("thinking")) is not None:
            found |= self._thinking(thinking, facts)
        return found

    def _thinking(self, thinking: Thinking, facts: ModelFacts) -> dict[str, Any]:
        reasons, has_switch = "REASONING" in facts.features, "enable_thinking" in facts.template_arguments
        if thinking.budget_tokens is not None:
            self.ignored["thinking.budget_tokens"] = None
        match thinking.type:
            case "adaptive":
                return {}
            case "disabled" if has_switch or not reasons:
                return {"enable_thinking": False} if has_switch else {}
            case "enabled" if reasons:
                return {"enable_thinking": True} if has_switch else {}
            case "enabled":
                raise _refused("thinking.type", "this model does not think; leave thinking out or disable it")
            case "disabled":
                raise _refused("thinking.type", "this model always thinks; leave thinking out")
        raise _refused("thinking.type", f"must be enabled, adaptive or disabled, not {thinking.type[:100]!r}")

    def _block(self, block: _Block, role: str, where: str) -> None:
        match block:
            case _Text(text=text):
                if text:
                    self._say(role, text, where)
            case _ToolUse():
                arguments = msgspec.json.encode(block.input).decode()
                self.turns.call(block.name, arguments, block.id, f"{where}.input")
            case _ToolResult():
                text = _JOINT.join([text for text in self._texts(block.content or "", f"{where}.content") if text])
                self.turns.answer(block.tool_use_id, f"Error: {text}" if block.is_error else text, where)
            case _:
                # Chat templates leave out what the model thought before.
                self.ignored["messages.thinking"] = None

    def _say(self, role: str, text: str, where: str) -> None:
        # An assistant's texts are pieces of one answer.
        self.turns.say(role, text, where, "" if role == "assistant" else _JOINT)

    def _texts(self, content: str | list[dict[str, Any]], where: str) -> list[str]:
        """Return the texts of blocks that are text alone."""
        if isinstance(content, str):
            return [content]
        texts = []
        for i, block in enumerate(content):
            match self._read(block, "system", f"{where}[{i}]"):
                case _Text(text=text):
                    texts.append(text)
        return texts

    def _read(self, block: dict[str, Any], role: str, where: str) -> _Block:
        kind = block.get("type")
        form = _KINDS[role].get(kind) if isinstance(kind, str) else None
        if form is None:
            if any(kind in kinds for kinds in _KINDS.values() if isinstance(kind, str)):
                raise InvalidRequest(f"{where}: a {kind} block does not belong here", field=where)
            raise not_read(kind, where)
        found: _Block = converted(block, form, where)
        self._note_cache_control(found.cache_control)
        return found

    def _tool(self, tool: dict[str, Any], where: str) -> Tool:
        if tool.get("type") not in (None, "custom"):
            raise _refused(
                f"{where}.type", f"this server runs no tools; must be custom, is {str(tool['type'])[:100]!r}"
            )
        found = converted(tool, _CustomTool, where)
        self._note_cache_control(found.cache_control)
        if found.allowed_callers not in (None, ["direct"]):
            raise _refused(f"{where}.allowed_callers", "only the model itself calls tools here")
        if found.defer_loading:
            raise _refused(f"{where}.defer_loading", "there is no tool search; the model sees every tool")
        if found.input_examples:
            raise _refused(f"{where}.input_examples", "write examples into the description")
        self.turns.places["chat." + where] = where
        self.turns.places[f"chat.{where}.parameters_json"] = f"{where}.input_schema"
        return tool_of(found.name, found.description, found.input_schema, found.strict)

    def _note_cache_control(self, value: Any) -> None:
        if value is not None:
            self.ignored[_CACHE_CONTROL] = None


def _required(choice: Choice) -> ToolChoice | None:
    """Return the requirement to call tools. Raise InvalidRequest."""
    match choice.type:
        case "auto" | "none":
            return None
        case "any":
            return ToolChoice(is_one=choice.disable_parallel_tool_use)
        case "tool" if choice.name:
            return ToolChoice(choice.name)
        case "tool":
            raise InvalidRequest("tool_choice.name: is missing", field="tool_choice.name")
    raise InvalidRequest("tool_choice.type: must be auto, any, tool or none", field="tool_choice.type")


def _refused(field: str, why: str) -> FeatureNotSupported:
    return FeatureNotSupported(f"{field}: {why}", field=field)
