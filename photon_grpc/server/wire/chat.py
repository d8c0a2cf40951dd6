"""Conversion of ChatInput → core.ask.ChatInput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from photon_grpc.core.admission import check_count
from photon_grpc.core.ask import ChatInput, ChatMessage, Tool, ToolChoice
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.server.wire.features import name_of
from photon_grpc.v1 import inference_pb2 as pb

#: Messages of one conversation, which take about 10 ms to convert, and all parts of them, which take about 20 ms more.
_MAX_MESSAGES = _MAX_PARTS = 4096
#: Of all messages, most of which answer a call.
_MAX_CALLS = 2048
_MAX_TOOLS = 128


def chat_of(chat: pb.ChatInput, facts: ModelFacts) -> ChatInput:
    """Return the chat, its text parts joined. Raise InvalidRequest, FeatureNotSupported.

    A list that is too long is refused before it becomes objects.
    """
    messages = chat.messages
    # Every message of a conversation renders to at least one token.
    check_count(len(messages), min(facts.max_context_tokens, _MAX_MESSAGES), "chat.messages")
    # Messages with calls or parts are few, and reading those lists of the others again would take as long as the rest.
    plain = [
        None if m.tool_calls or m.parts else ChatMessage(m.role, m.content, m.name, m.tool_call_id, m.tool_calls_json)
        for m in messages
    ]
    return ChatInput(
        messages=tuple(_complete(messages, plain) if None in plain else cast("list[ChatMessage]", plain)),
        template_args_json=chat.template_args_json,
        tools_json=chat.tools_json,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        tool_choice=_tool_choice(chat.tool_choice) if chat.HasField("tool_choice") else None,
        tools=_tools(tools) if (tools := chat.tools) else (),
    )


def _tool_choice(choice: pb.ToolChoice) -> ToolChoice:
    return ToolChoice(choice.name if choice.WhichOneof("choice") == "name" else None)


def _tools(tools: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    check_count(len(tools), _MAX_TOOLS, "chat.tools")
    return tuple(
        [
            Tool(tool.name, tool.description, tool.parameters_json, tool.strict if tool.HasField("strict") else None)
            for tool in tools
        ]
    )


def _complete(messages: Sequence[pb.ChatMessage], plain: Sequence[ChatMessage | None]) -> Iterator[ChatMessage]:
    """Yield `plain` with the messages in place of None, which have calls or parts."""
    num_parts = num_calls = 0
    for i, (message, read) in enumerate(zip(messages, plain, strict=True)):
        if read is not None:
            yield read
            continue
        parts, calls = message.parts, message.tool_calls
        num_parts += len(parts)
        num_calls += len(calls)
        if num_parts > _MAX_PARTS or num_calls > _MAX_CALLS:
            check_count(num_parts, _MAX_PARTS, f"chat.messages[{i}].parts")
            check_count(num_calls, _MAX_CALLS, f"chat.messages[{i}].tool_calls")
        yield ChatMessage(
            message.role,
            _joined(message.content, parts, i) if num_parts else message.content,
            message.name,
            message.tool_call_id,
            message.tool_calls_json,
            tuple([ToolCall(call.index, call.name, call.arguments_json, call.id) for call in calls]),
        )


def _joined(content: str, parts: Sequence[pb.ContentPart], index: int) -> str:
    """Return the text of a message, which may be in parts."""
    texts = [part.text for part in parts]
    if texts and content:
        field = f"chat.messages[{index}].parts"
        raise InvalidRequest(f"{field}: content is set, too; set one of them", field=field)
    for i, text in enumerate(texts):
        if not text and (kind := parts[i].WhichOneof("part")) != "text":
            raise _no_text(kind, f"chat.messages[{index}].parts[{i}]")
    return "".join(texts) if texts else content


def _no_text(kind: str | None, field: str) -> InvalidRequest | FeatureNotSupported:
    if kind is None:
        return InvalidRequest(f"{field}: is empty; set its text", field=field)
    path = f"{field}.{kind}"
    feature = name_of(path).removeprefix("FEATURE_")
    return FeatureNotSupported(f"{path}: the model takes text only (feature {feature})", field=path)
