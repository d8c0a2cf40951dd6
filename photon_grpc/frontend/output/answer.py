"""The parts of a chat's output: reasoning, content, tool calls. The text itself stays as it is.

The marks of these parts are read from the model's own chat template when it is loaded, never guessed from its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from photon_grpc.core.ask import ChatInput
from photon_grpc.core.call_form import BARE, LISTED, TAGGED, CallForm, CallSyntax
from photon_grpc.core.generation import ToolCall
from photon_grpc.frontend.output import reasoning
from photon_grpc.frontend.output.call_ids import CallIds
from photon_grpc.frontend.output.reasoning import MarkedReasoning, NoReasoning, Reasoning
from photon_grpc.frontend.output.tool_calls import NoToolCalls, ToolCallParser, ToolCalls

#: Pieces of text that are parsed at a time.
_SLICE = 64
#: The key of a JSON object, in a template's text or in a string literal of it.
_KEY = r"""\\?["']{}\\?["']"""
_ARGUMENTS = re.compile(_KEY.format("arguments"))
#: `{"name": function name, "parameters": dictionary of argument name and its value}`.
_BARE = re.compile(rf"\{{{_KEY.format('name')}:[^{{}}]*{_KEY.format('parameters')}:")


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an output's new text."""

    reasoning: str = ""
    #: Text that is neither reasoning nor a call.
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


NO_ANSWER = Answer()


def joined_answer(parts: Sequence[Answer]) -> Answer:
    """Join consecutive parts of one output."""
    filled = [part for part in parts if part is not NO_ANSWER]
    if len(filled) < 2:
        return filled[0] if filled else NO_ANSWER
    return Answer(
        "".join([part.reasoning for part in filled]),
        "".join([part.content for part in filled]),
        tuple(chain.from_iterable(part.tool_calls for part in filled)),
    )


class AnswerParser:
    """Splits one output into reasoning and the rest, and the rest into calls and content."""

    def __init__(self, reasoning: Reasoning, tool_calls: ToolCalls) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._unread: list[str] = []
        self._read: list[Answer] = []

    def push(self, text: str) -> None:
        """Add the next text.

        It is parsed in slices, since single tokens would take longer and the whole text would block the event loop.
        """
        self._unread.append(text)
        if len(self._unread) == _SLICE:
            self._read_on(is_over=False)

    def take(self, *, is_over: bool) -> Answer:
        """Return the parts since the last call. With `is_over`, which may be repeated, nothing is held back."""
        self._read_on(is_over)
        answer = joined_answer(self._read)
        self._read = []
        return answer

    def _read_on(self, is_over: bool) -> None:
        reasoning, rest = self._reasoning.push("".join(self._unread), is_over)
        self._unread = []
        content, calls = self._tool_calls.push(rest, is_over)
        self._read.append(Answer(reasoning, content, calls))


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The marks by which a model writes its answers."""

    #: Whether reasoning stands between reasoning.OPEN and reasoning.CLOSE.
    has_reasoning: bool = False
    #: None if no known syntax of calls is in the template.
    calls: CallSyntax | None = None

    @classmethod
    def of(cls, template: str, special_texts: Collection[str] = ()) -> AnswerFormat:
        """Return the format of a chat template. Marks that are special tokens do not count: they release no text."""
        marks = (reasoning.OPEN, reasoning.CLOSE)
        return cls(
            has_reasoning=reasoning.CLOSE in template and not any(mark in special_texts for mark in marks),
            calls=_call_syntax(template, special_texts),
        )

    @property
    def has_parts(self) -> bool:
        return self.has_reasoning or self.calls is not None

    def parser(self, chat: ChatInput, prompt_end: str, call_ids: CallIds) -> AnswerParser:
        """Return a parser for one output. It looks for calls only if the caller has defined tools."""
        calls = self.calls if chat.has_tools else None
        return AnswerParser(
            MarkedReasoning(is_open=_opens_reasoning(prompt_end)) if self.has_reasoning else NoReasoning(),
            NoToolCalls() if calls is None else ToolCallParser(calls, call_ids),
        )

    def call_form(self, prompt_end: str) -> CallForm | None:
        """Return the form of an output of reasoning and calls alone, None if no syntax of calls is known."""
        if self.calls is None:
            return None
        if not self.has_reasoning or prompt_end.rstrip().endswith(reasoning.CLOSE):
            return CallForm(self.calls)
        return CallForm(self.calls, "open" if _opens_reasoning(prompt_end) else "optional")


#: The format of a model without a template, or without marks in it.
PLAIN = AnswerFormat()


def _opens_reasoning(prompt_end: str) -> bool:
    return prompt_end.rstrip().endswith(reasoning.OPEN)


def _call_syntax(template: str, special_texts: Collection[str]) -> CallSyntax | None:
    tags = (TAGGED.open, TAGGED.close)
    if all(tag in template and tag not in special_texts for tag in tags) and _ARGUMENTS.search(template):
        return TAGGED
    # Newer templates of Mistral write [TOOL_CALLS]name[ARGS]{…}.
    if LISTED.open in template and "[ARGS]" not in template:
        return LISTED
    return BARE if _BARE.search(template) else None
