"""Parsers of tool calls in an output's text, in the syntax of the model's own chat template.

A call is a JSON object with a name and with arguments that are an object, written where the syntax expects one.
Anything else is text; a model's mistake is never an error. Each character is read once, so that tokens and messages do
not affect the result and no text is slow to parse.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import msgspec

from photon_grpc.core.call_form import CallSyntax
from photon_grpc.core.generation import ToolCall
from photon_grpc.frontend.output.call_ids import CallIds
from photon_grpc.frontend.output.reasoning import length_of_beginning

#: The most characters from a call's opening to the end of its object; anything longer is text.
MAX_CALL_CHARS = 2**18
#: Nesting of objects and arrays.
MAX_CALL_DEPTH = 64
_ARGUMENTS = ("arguments", "parameters")
_BLANK = re.compile(r"\s*")
_BLANK_OR_SEPARATOR = re.compile(r"[\s;]*")
#: The characters that matter outside strings, where "<" is no JSON, and within strings.
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')


class ToolCalls(Protocol):
    """The parser of one output."""

    def push(self, text: str, is_over: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text outside calls and the calls that `text` releases. With `is_over` nothing is held back."""


class NoToolCalls:
    """A parser of outputs without calls."""

    def push(self, text: str, is_over: bool) -> tuple[str, tuple[ToolCall, ...]]:
        return text, ()


class ToolCallParser:
    """A parser of the calls of one CallSyntax. It holds back text that may belong to a call until that is certain."""

    def __init__(self, syntax: CallSyntax, ids: CallIds) -> None:
        self._syntax = syntax
        self._ids = ids
        #: Undecided text; between calls of `push` it begins where a call may open.
        self._text = ""
        #: Text before `_start` is decided; text before `_at` has been read.
        self._start = self._at = 0
        #: The bounds of the call's object.
        self._begin = self._end = 0
        self._depth = 0
        self._is_in_string = False
        self._num_calls = 0
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        #: The method for what comes next; it returns False if it needs more text.
        self._step: Callable[[ToolCallParser, bool], bool] = self._first_step()

    def push(self, text: str, is_over: bool) -> tuple[str, tuple[ToolCall, ...]]:
        self._text += text
        while self._step(self, is_over):
            pass
        if is_over:
            self._release(len(self._text))
        self._forget_decided()
        content, calls = "".join(self._content), tuple(self._calls)
        self._content, self._calls = [], []
        return content, calls

    # Steps of the parser.

    def _seek(self, is_over: bool) -> bool:
        """Find the next opening."""
        mark = self._syntax.open
        found = self._text.find(mark, self._start)
        if found < 0:
            self._release(len(self._text) - length_of_beginning(self._text[self._start :], mark))
            return False
        self._release(found)
        self._at += len(mark)
        self._step = self._opened_step()
        return True

    def _expect_list(self, is_over: bool) -> bool:
        self._skip(_BLANK)
        if self._needs_more():
            return False
        if self._is_too_long():
            return self._give_up()
        mark = self._syntax.open
        if self._text.startswith(mark, self._at):
            self._at += len(mark)
            return True
        if not is_over and self._is_end_a_beginning_of(mark):
            return False
        if self._text[self._at] != "[":
            return self._give_up()
        self._at += 1
        self._step = ToolCallParser._expect_object
        return True

    def _expect_entry(self, is_over: bool) -> bool:
        """Go on to the list's next call, or behind its end."""
        self._skip(_BLANK)
        if self._needs_more():
            return False
        if self._is_too_long() or self._text[self._at] not in ",]":
            return self._give_up()
        is_end = self._text[self._at] == "]"
        self._at += 1
        if is_end:
            self._start = self._at
        self._step = ToolCallParser._seek if is_end else ToolCallParser._expect_object
        return True

    def _expect_object(self, is_over: bool) -> bool:
        self._skip(_BLANK_OR_SEPARATOR if self._syntax.is_bare and not self._syntax.is_list else _BLANK)
        if self._needs_more():
            return False
        if self._is_too_long() or self._text[self._at] != "{":
            return self._give_up()
        self._begin, self._depth, self._is_in_string = self._at, 0, False
        self._step = ToolCallParser._read_object
        return True

    def _read_object(self, is_over: bool) -> bool:
        pattern = _IN_STRING if self._is_in_string else _STRUCTURE
        found = pattern.search(self._text, self._at, self._limit)
        if found is None:
            self._at = min(len(self._text), self._limit)
            return self._is_too_long() and self._give_up()
        self._at = found.start()
        return self._read(found.group())

    def _read(self, char: str) -> bool:
        """Read one character that matters."""
        if char == "\\":
            if self._at + 1 == len(self._text):
                return False
            self._at += 1
        elif char == '"':
            self._is_in_string = not self._is_in_string
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        else:
            return self._give_up()
        self._at += 1
        if not self._depth:
            self._end = self._at
            self._step = ToolCallParser._expect_close
        return self._depth <= MAX_CALL_DEPTH or self._give_up()

    def _expect_close(self, is_over: bool) -> bool:
        mark = self._syntax.close
        if mark:
            self._skip(_BLANK)
        if self._text.startswith(mark, self._at):
            self._at += len(mark)
        elif not self._is_end_a_beginning_of(mark):
            return self._give_up()
        elif not is_over:
            return False
        else:
            # The end of an output, for example at a stop string, closes the call.
            self._at = len(self._text)
        return self._finish_call()

    # Results.

    def _finish_call(self) -> bool:
        call = read_call(self._text[self._begin : self._end], self._num_calls, self._ids)
        if call is None:
            return self._give_up()
        self._calls.append(call)
        self._num_calls += 1
        self._start = self._at
        self._step = ToolCallParser._expect_entry if self._syntax.is_list else self._first_step()
        return True

    def _give_up(self) -> bool:
        """Release what has been read as text."""
        self._release(self._at)
        self._step = ToolCallParser._seek
        return True

    def _first_step(self) -> Callable[[ToolCallParser, bool], bool]:
        return self._opened_step() if self._syntax.is_bare else ToolCallParser._seek

    def _opened_step(self) -> Callable[[ToolCallParser, bool], bool]:
        return ToolCallParser._expect_list if self._syntax.is_list else ToolCallParser._expect_object

    def _release(self, end: int) -> None:
        """Release the text up to `end`, which belongs to no call."""
        self._content.append(self._text[self._start : end])
        self._start = self._at = end

    def _forget_decided(self) -> None:
        start = self._start
        self._text = self._text[start:]
        self._at -= start
        self._begin -= start
        self._end -= start
        self._start = 0

    # Position.

    @property
    def _limit(self) -> int:
        return self._start + MAX_CALL_CHARS

    def _skip(self, blank: re.Pattern[str]) -> None:
        match = blank.match(self._text, self._at, self._limit)
        self._at = match.end() if match else self._at

    def _is_end_a_beginning_of(self, mark: str) -> bool:
        return len(self._text) - self._at < len(mark) and mark.startswith(self._text[self._at :])

    def _needs_more(self) -> bool:
        return self._at == len(self._text) and not self._is_too_long()

    def _is_too_long(self) -> bool:
        return self._at >= self._limit


def read_call(text: str, index: int, ids: CallIds) -> ToolCall | None:
    """Return the call that a JSON object stands for, None if it is not a call."""
    try:
        members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(members["name"], type=str)
        arguments = next(bytes(members[key]) for key in _ARGUMENTS if key in members).decode()
    except (msgspec.MsgspecError, KeyError, StopIteration, UnicodeError, RecursionError):
        return None
    return ToolCall(index, name, arguments, ids.of(index)) if name and arguments.startswith("{") else None
