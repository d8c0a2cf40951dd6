"""Tool calls in an output's text, as the model's own chat template has the model write them.

A call stands in the text when it is a JSON object with a name and with arguments that are an object, written where the
syntax has one. Anything else is text: what a model gets wrong is never an error. Each character is looked at once, so
that neither tokens nor messages can change the result, and no text makes it slow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import msgspec

from photon_grpc.core.call_form import CallSyntax
from photon_grpc.core.generation import ToolCall
from photon_grpc.frontend.output.reasoning import length_of_beginning

#: From its opening to the end of its object; what is longer is text.
MAX_CALL_CHARS = 2**18
#: Objects and arrays within one another.
MAX_CALL_DEPTH = 64
_ARGUMENTS = ("arguments", "parameters")
_BLANK = re.compile(r"\s*")
_BLANK_OR_SEPARATOR = re.compile(r"[\s;]*")
#: What matters outside of strings, where no JSON has "<", and in them.
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')


class ToolCalls(Protocol):
    """One output's."""

    def push(self, text: str, is_over: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text outside of calls and the calls that the next text releases. With `is_over` nothing is held
        back."""


class NoToolCalls:
    """No text is a call."""

    def push(self, text: str, is_over: bool) -> tuple[str, tuple[ToolCall, ...]]:
        return text, ()


class WrittenToolCalls:
    """Those of one CallSyntax. Text that may belong to a call is held back until that is certain."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        #: Undecided, between calls of `push` from what may be a call's opening.
        self._text = ""
        #: What is before it is decided; what is before the other has been looked at.
        self._start = self._at = 0
        #: Where its object begins and ends.
        self._begin = self._end = 0
        self._depth = 0
        self._is_in_string = False
        self._num_calls = 0
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        #: What comes next, a method of this class; False: it needs more text.
        self._step: Callable[[WrittenToolCalls, bool], bool] = self._first_step()

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

    # What comes next.

    def _seek(self, is_over: bool) -> bool:
        """Return the next opening."""
        mark = self._syntax.open
        found = self._text.find(mark, self._start)
        if found < 0:
            self._release(len(self._text) - length_of_beginning(self._text[self._start :], mark))
            return False
        self._release(found)
        self._at += len(mark)
        self._step = WrittenToolCalls._expect_object
        return True

    def _expect_object(self, is_over: bool) -> bool:
        self._skip(_BLANK_OR_SEPARATOR if self._syntax.is_bare else _BLANK)
        if self._needs_more():
            return False
        if self._is_too_long() or self._text[self._at] != "{":
            return self._give_up()
        self._begin, self._depth, self._is_in_string = self._at, 0, False
        self._step = WrittenToolCalls._read_object
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
        """One character that matters."""
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
            self._step = WrittenToolCalls._expect_close
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
            # An output that ends with its object, as at a stop string, has closed it.
            self._at = len(self._text)
        return self._finish_call()

    # What was found.

    def _finish_call(self) -> bool:
        call = read_call(self._text[self._begin : self._end], self._num_calls)
        if call is None:
            return self._give_up()
        self._calls.append(call)
        self._num_calls += 1
        self._start = self._at
        self._step = self._first_step()
        return True

    def _give_up(self) -> bool:
        """Release what has been looked at as text."""
        self._release(self._at)
        self._step = WrittenToolCalls._seek
        return True

    def _first_step(self) -> Callable[[WrittenToolCalls, bool], bool]:
        return WrittenToolCalls._expect_object if self._syntax.is_bare else WrittenToolCalls._seek

    def _release(self, end: int) -> None:
        """The text up to `end` is none of a call."""
        self._content.append(self._text[self._start : end])
        self._start = self._at = end

    def _forget_decided(self) -> None:
        start = self._start
        self._text = self._text[start:]
        self._at -= start
        self._begin -= start
        self._end -= start
        self._start = 0

    # Where it is.

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


def read_call(text: str, index: int) -> ToolCall | None:
    """Return the call that a JSON object stands for; None where it is none."""
    try:
        members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(members["name"], type=str)
        arguments = next(bytes(members[key]) for key in _ARGUMENTS if key in members).decode()
    except (msgspec.MsgspecError, KeyError, StopIteration, UnicodeError, RecursionError):
        return None
    return ToolCall(index, name, arguments) if name and arguments.startswith("{") else None
