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

#: Messages of one conversation, and in all of them together parts and tool calls; converting them takes about 10 ms.
_MAX_MESSAGES = _MAX_PARTS = _MAX_TOOL_CALLS = 4096
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
        path = f"chat.messages[{i}]"
        num_parts += len(message.parts)
        check_count(num_parts, _MAX_PARTS, f"{path}.parts")
        num_calls += len(message.tool_calls)
        check_count(num_calls, _MAX_TOOL_CALLS, f"{path}.tool_calls")
        yield _message(message, f"{path}.parts")


def _message(message: pb.ChatMessage, parts_field: str) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=_joined(message, parts_field) if message.parts else message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls_json=message.tool_calls_json,
        tool_calls=tuple([ToolCall(c.index, c.name, c.arguments_json, c.id) for c in message.tool_calls]),
    )


def _joined(message: pb.ChatMessage, field: str) -> str:
    """Return the text of a message in parts."""
    if message.content:
        raise InvalidRequest(f"{field}: content is set, too; set one of them", field=field)
    for i, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            raise InvalidRequest(f"{field}[{i}]: is empty; set its text", field=f"{field}[{i}]")
        if kind != "text":
            path = f"{field}[{i}].{kind}"
            feature = name_of(path).removeprefix("FEATURE_")
            raise FeatureNotSupported(f"{path}: the model takes text only (feature {feature})", field=path)
    return "".join([part.text for part in message.parts])
