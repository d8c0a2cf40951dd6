"""A stream's news as plain data; the server turns it into messages.

What is made for every token is a msgspec.Struct: a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import msgspec

from photon_grpc.core.generation import Start, Timing, ToolCall, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InternalFailure
from photon_grpc.frontend.output.answer import NO_ANSWER, Answer, joined_answer
from photon_grpc.frontend.output.logprobs import NO_TOKEN_LOGPROBS, TokenLogprobs, joined


@dataclass(frozen=True, slots=True)
class OutputFinish:
    reason: FinishReason
    #: Its cause; at most one is set.
    stop_string: str | None = None
    stop_token_id: int | None = None
    eos_token_id: int | None = None
    #: Of typed output that is complete: the JSON of its message, with the ids that it continues from.
    message_json: bytes = b""


class OutputDelta(msgspec.Struct, frozen=True):
    """New ids of one output, the text that they release, and their scores."""

    index: int
    text: str = ""
    #: Empty unless OutputOptions.token_ids asks for them.
    token_ids: tuple[int, ...] = ()
    finish: OutputFinish | None = None
    scores: TokenLogprobs = NO_TOKEN_LOGPROBS
    #: Of the text of a chat, where the model has marks for them (see answer.py).
    answer: Answer = NO_ANSWER

    @property
    def reasoning(self) -> str:
        return self.answer.reasoning

    @property
    def content(self) -> str:
        return self.answer.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.answer.tool_calls


class Update(msgspec.Struct, frozen=True):
    """One message's worth of a stream. `timing` is set on the last one only."""

    deltas: tuple[OutputDelta, ...]
    #: On the last one, or on every one with continuous_usage.
    usage: Usage | None = None
    timing: Timing | None = None
    #: On the first one: those of the whole prompt.
    prompt_scores: TokenLogprobs = NO_TOKEN_LOGPROBS


@dataclass(frozen=True, slots=True)
class Result:
    """The whole of a generation."""

    start: Start
    outputs: tuple[OutputDelta, ...]
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    prompt_scores: TokenLogprobs = NO_TOKEN_LOGPROBS


def gathered(start: Start, updates: list[Update]) -> Result:
    """All that a stream said, as one."""
    texts: dict[int, list[OutputDelta]] = {}
    for update in updates:
        for delta in update.deltas:
            texts.setdefault(delta.index, []).append(delta)
    outputs = tuple(
        OutputDelta(
            index,
            "".join([delta.text for delta in deltas]),
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            deltas[-1].finish,
            joined([delta.scores for delta in deltas]),
            joined_answer([delta.answer for delta in deltas]),
        )
        for index, deltas in sorted(texts.items())
    )
    last = updates[-1]
    if last.usage is None or last.timing is None:
        raise InternalFailure("a stream ended without its usage")
    return Result(start, outputs, last.usage, last.timing, updates[0].prompt_scores)
