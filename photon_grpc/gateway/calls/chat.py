"""Texts, tools and turns of chats, for all APIs that have chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from photon_grpc.core.ask import ChatInput, ChatMessage, Tool
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import FeatureNotSupported
from photon_grpc.frontend.model import ModelFacts

#: Characters of a caller's word in an error message.
_MAX_WORD = 100


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


def text_of(content: str | Sequence[TextPart] | None, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content. Raise FeatureNotSupported naming the part that is none of `kinds`."""
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type not in kinds:
            raise not_read(part.type, f"{where}[{i}]")
    return "".join([part.text or "" for part in content])


def not_read(kind: object, where: str) -> FeatureNotSupported:
    """Return the error for a part of a content that is no text."""
    return FeatureNotSupported(f"{where}: this server reads text only, not {str(kind)[:_MAX_WORD]!r}", field=where)


def tool_of(name: str, description: str | None, schema: Any, strict: bool | None) -> Tool:
    """Return a tool whose arguments follow the JSON Schema, None if it takes none."""
    return Tool(name, description or "", "" if schema is None else msgspec.json.encode(schema).decode(), strict)


class BodyChat(NamedTuple):
    """The chat of one body."""

    input: ChatInput
    #: What in it has no effect.
    ignored: tuple[str, ...]
    #: The places in the body by the paths that errors have.
    places: Mapping[str, str]


def effort_of(effort: str, facts: ModelFacts) -> dict[str, Any]:
    """Return the variable of the chat template that sets the effort of reasoning; none if the template knows none."""
    return {"reasoning_effort": effort} if "reasoning_effort" in facts.template_arguments else {}


@dataclass(slots=True)
class _Turn:
    role: str
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    answered_call: str = ""


class Turns:
    """The turns of a chat as chat templates expect them.

    The answer of a tool is a message of its own; all that an assistant says and calls before others speak is one.
    """

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        #: The places in the body by the paths that errors have.
        self.places: dict[str, str] = {}

    def say(self, role: str, text: str, place: str, joint: str | None = None) -> None:
        """Add a text. With `joint` between them it continues the turn before it, if that is of the same role."""
        last = self._turns[-1] if self._turns else None
        if joint is None or last is None or last.role != role:
            self._begin(_Turn(role, [text]), place)
        else:
            last.texts += [joint, text] if last.texts else [text]

    def call(self, name: str, arguments_json: str, call_id: str, place: str) -> None:
        """Add a call to the assistant's turn."""
        if not self._turns or self._turns[-1].role != "assistant":
            self._begin(_Turn("assistant"), place)
        calls = self._turns[-1].calls
        self.places[f"{self._path()}.tool_calls[{len(calls)}].arguments_json"] = place
        calls.append(ToolCall(len(calls), name, arguments_json, call_id))

    def answer(self, call_id: str, text: str, place: str) -> None:
        """Add what a call returned."""
        self._begin(_Turn("tool", [text], answered_call=call_id), place)

    def messages(self) -> tuple[ChatMessage, ...]:
        """Return the messages of all turns."""
        return tuple(
            [
                ChatMessage(
                    turn.role, "".join(turn.texts), tool_call_id=turn.answered_call, tool_calls=tuple(turn.calls)
                )
                for turn in self._turns
            ]
        )

    def _begin(self, turn: _Turn, place: str) -> None:
        self._turns.append(turn)
        self.places[self._path()] = place

    def _path(self) -> str:
        return f"chat.messages[{len(self._turns) - 1}]"
