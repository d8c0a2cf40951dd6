"""The parts of a chat's output in the order in which a reader gets them: reasoning, text and calls, each in a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from photon_grpc.core.generation import ToolCall
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import AbortedByAdmin
from photon_grpc.frontend.output.answer import NO_ANSWER
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish

Kind = Literal["reasoning", "text", "call"]


class OutputPart(NamedTuple):
    """A piece of reasoning or text, or a whole call."""

    kind: Kind
    text: str = ""
    call: ToolCall | None = None


class OutputParts:
    """Splits the deltas of one output into parts.

    White space around calls is no text of its own, so blank text is held back until more text or the end follows.
    """

    def __init__(self, *, has_one_call: bool = False) -> None:
        """With `has_one_call`, leave out what follows after the first call."""
        self._has_one_call = has_one_call
        self.has_calls = False
        self._has_text = False
        self._blank = ""

    @property
    def is_full(self) -> bool:
        """Whether whatever follows is left out."""
        return self._has_one_call and self.has_calls

    def abort(self, finish: OutputFinish | None) -> AbortedByAdmin | None:
        """Return the error for an output that an operator cut, in APIs that have no word for such an end."""
        if finish is None or finish.reason is not FinishReason.ABORTED or self.is_full:
            return None
        return AbortedByAdmin("an operator aborted this request after its output had begun")

    def of(self, delta: OutputDelta) -> Sequence[OutputPart]:
        """Return the parts of the next delta."""
        if delta.answer is NO_ANSWER:
            return self._text(delta.text, is_over=delta.finish is not None)
        found: list[OutputPart] = []
        if delta.reasoning:
            found.append(OutputPart("reasoning", delta.reasoning))
        found += self._text(delta.content, is_over=delta.finish is not None and not delta.tool_calls)
        for call in delta.tool_calls:
            if not self.is_full:
                self.has_calls = True
                self._has_text, self._blank = False, ""
                found.append(OutputPart("call", call=call))
        return found

    def _text(self, text: str, *, is_over: bool) -> Sequence[OutputPart]:
        if self.is_full:
            return ()
        if not self._has_text:
            text = self._blank + text
            is_blank = not text or text.isspace()
            if is_blank and not (is_over and not self.has_calls):
                self._blank = text
                return ()
            self._has_text = not is_blank
        return (OutputPart("text", text),) if text else ()


class BlockForm(Protocol):
    """The form of an output's blocks as events of an API."""

    def opened(self, part: OutputPart) -> bytes:
        """Return the events before the first part of a block."""

    def more(self, part: OutputPart) -> bytes: ...

    def closed(self) -> bytes:
        """Return the events after the last part of the open block."""


class Blocks:
    """Writes consecutive parts of one kind as one block, and every call as one."""

    def __init__(self, parts: OutputParts, form: BlockForm) -> None:
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

    def _event(self, part: OutputPart) -> bytes:
        if part.kind == self._open != "call":
            return self._form.more(part)
        before = self.close()
        self._open = part.kind
        return before + self._form.opened(part) + self._form.more(part)
