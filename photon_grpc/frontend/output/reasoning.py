"""Parsers that split reasoning at the beginning of an output from the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

OPEN = "<think>"
CLOSE = "</think>"
#: The most white space before OPEN.
_MAX_BLANK = 64


class Reasoning(Protocol):
    """The parser of one output."""

    def push(self, text: str, is_over: bool) -> tuple[str, str]:
        """Return the reasoning and the rest that the next text releases. With `is_over` nothing is held back."""


class NoReasoning:
    """A parser of outputs without reasoning."""

    def push(self, text: str, is_over: bool) -> tuple[str, str]:
        return "", text


class MarkedReasoning:
    """A parser of reasoning between OPEN, which begins the output or ends the prompt, and the first CLOSE.

    Later marks are text, since an answer may mention them. Text that may be the beginning of a mark is held back.
    """

    def __init__(self, *, is_open: bool) -> None:
        """Start within reasoning if `is_open`, which means that the prompt ends with OPEN."""
        self._held = ""
        #: The method for the next text.
        self._step: Callable[[MarkedReasoning, str, bool], tuple[str, str]]
        self._step = MarkedReasoning._reason if is_open else MarkedReasoning._begin

    def push(self, text: str, is_over: bool) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        return self._step(self, text, is_over)

    def _begin(self, text: str, is_over: bool) -> tuple[str, str]:
        stripped = text.lstrip()
        num_blank = len(text) - len(stripped)
        if num_blank > _MAX_BLANK or not (stripped.startswith(OPEN) or OPEN.startswith(stripped)):
            return self._follow(text)
        if stripped.startswith(OPEN):
            return self._reason(stripped[len(OPEN) :], is_over)
        if is_over:
            return "", text
        self._held = text
        return "", ""

    def _reason(self, text: str, is_over: bool) -> tuple[str, str]:
        self._step = MarkedReasoning._reason
        reasoning, mark, rest = text.partition(CLOSE)
        if mark:
            return reasoning, self._follow(rest)[1]
        cut = len(text) if is_over else len(text) - length_of_beginning(text, CLOSE)
        self._held = text[cut:]
        return text[:cut], ""

    def _follow(self, text: str, is_over: bool = False) -> tuple[str, str]:
        self._step = MarkedReasoning._follow
        return "", text


def length_of_beginning(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that begin an incomplete `mark`."""
    at = text.find(mark[0], max(len(text) - len(mark) + 1, 0))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0
