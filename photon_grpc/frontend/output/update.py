"""New output of a stream as plain data, which the server turns into messages.

Objects made for every token are msgspec.Structs, since a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import msgspec

from photon_grpc.core.generation import OutputUsage, Start, Timing, ToolCall, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InternalFailure
from photon_grpc.frontend.output.answer import NO_ANSWER, Answer, joined_answer
from photon_grpc.frontend.output.logprobs import NO_TOKEN_LOGPROBS, TokenLogprobs, joined


@dataclass(frozen=True, slots=True)
class OutputFinish:
    reason: FinishReason
    #: The cause; at most one of the three is set.
    stop_string: str | None = None
    stop_token_id: int | None = None
    eos_token_id: int | None = None
    #: The JSON of complete typed output, including the ids that it continues from.
    message_json: bytes = b""


class OutputDelta(msgspec.Struct, frozen=True):
    """New ids of one output, the text that they release, and their log-probabilities."""

    index: int
    text: str = ""
    #: Empty unless OutputOptions.token_ids asks for them.
    token_ids: tuple[int, ...] = ()
    finish: OutputFinish | None = None
    scores: TokenLogprobs = NO_TOKEN_LOGPROBS
    #: The parts of a chat's text, if the model has marks for them (see answer.py).
    answer: Answer = NO_ANSWER
    #: Set with `finish`.
    usage: OutputUsage | None = None

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
    """The content of one message of a stream. Only the last one has a timing."""

    deltas: tuple[OutputDelta, ...]
    #: Set on the last one, or on every one with continuous_usage.
    usage: Usage | None = None
    timing: Timing | None = None
    #: Set on the first one, for the whole prompt.
    prompt_scores: TokenLogprobs = NO_TOKEN_LOGPROBS


@dataclass(frozen=True, slots=True)
class Result:
    """A complete generation."""

    start: Start
    outputs: tuple[OutputDelta, ...]
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    prompt_scores: TokenLogprobs = NO_TOKEN_LOGPROBS


def gathered(start: Start, updates: list[Update]) -> Result:
    """Merge all updates of a stream into its result."""
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
            deltas[-1].usage,
        )
        for index, deltas in sorted(texts.items())
    )
    last = updates[-1]
    if last.usage is None or last.timing is None:
        raise InternalFailure("a stream ended without its usage")
    return Result(start, outputs, last.usage, last.timing, updates[0].prompt_scores)
