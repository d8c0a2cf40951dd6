"""The parts of a chat's output in the order in which a reader gets them: reasoning, text and calls, each in a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from photon_grpc.core.generation import ToolCall
from photon_grpc.frontend.output.answer import NO_ANSWER
from photon_grpc.frontend.output.update import OutputDelta

Kind = Literal["reasoning", "text", "call"]


class Part(NamedTuple):
    """A piece of reasoning or text, or a whole call."""

    kind: Kind
    text: str = ""
    call: ToolCall | None = None


class Parts:
    """Splits the deltas of one output into parts.

    White space around calls is no text of its own, so blank text is held back until more text or the end follows.
    """

    def __init__(self, *, max_calls: int | None = None) -> None:
        """Leave out what follows after `max_calls` calls."""
        self._max_calls = max_calls
        self._num_calls = 0
        self._has_text = False
        self._blank = ""

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def of(self, delta: OutputDelta) -> Sequence[Part]:
        """Return the parts of the next delta."""
        if delta.answer is NO_ANSWER:
            return self._text(delta.text, is_over=delta.finish is not None)
        found: list[Part] = []
        if delta.reasoning:
            found.append(Part("reasoning", delta.reasoning))
        found += self._text(delta.content, is_over=delta.finish is not None and not delta.tool_calls)
        for call in delta.tool_calls:
            if not self._is_full():
                self._num_calls += 1
                self._has_text, self._blank = False, ""
                found.append(Part("call", call=call))
        return found

    def _text(self, text: str, *, is_over: bool) -> Sequence[Part]:
        if self._is_full():
            return ()
        if not self._has_text:
            text = self._blank + text
            is_blank = not text or text.isspace()
            if is_blank and not (is_over and not self.has_calls):
                self._blank = text
                return ()
            self._has_text = not is_blank
        return (Part("text", text),) if text else ()

    def _is_full(self) -> bool:
        return self._max_calls is not None and self._num_calls >= self._max_calls


class BlockForm(Protocol):
    """How an API writes the blocks of an output as events."""

    def opened(self, part: Part) -> bytes:
        """Return the events before the first part of a block."""

    def more(self, part: Part) -> bytes: ...

    def closed(self) -> bytes:
        """Return the events after the last part of the open block."""


class Blocks:
    """Writes consecutive parts of one kind as one block, and every call as one."""

    def __init__(self, parts: Parts, form: BlockForm) -> None:
        self._parts = parts
        self._form = form
        self._open: Kind | None = None

    def events(self, delta: OutputDelta) -> bytes:
        """Return the events of the next delta."""
        return b"".join([self._event(part) for part in self._parts.of(delta)])

    def close(self) -> bytes:
        """Return the events that close the open block."""
        if self._open is None:
            return b""
        self._open = None
        return self._form.closed()

    def _event(self, part: Part) -> bytes:
        if part.kind == self._open != "call":
            return self._form.more(part)
        before = self.close()
        self._open = part.kind
        return before + self._form.opened(part) + self._form.more(part)
