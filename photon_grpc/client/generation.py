"""Results of calls as plain data. Durations are in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from photon_grpc.client.answer_types import AnswerTypes, parsed, unwrapped
from photon_grpc.client.enum_name import enum_name
from photon_grpc.client.message_type import read_message
from photon_grpc.core.generation import Candidate, OutputUsage, Start, Timing, TokenScore, ToolCall, Usage
from photon_grpc.v1 import inference_pb2 as pb

_REASON_PREFIX = "FINISH_REASON_"

NO_TYPES = AnswerTypes()


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an output.

    `reason` is a FinishReason of the proto without its prefix, such as "MAX_TOKENS", or a number if this client does
    not know it.
    """

    reason: str
    stop_string: str | None = None
    stop_token_id: int | None = None
    eos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, ids and scores of one output. The texts of an index, joined, are its whole text."""

    index: int
    text: str = ""
    #: Filled with token_ids=True.
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    #: One per new token, with logprobs or score_token_ids.
    scores: tuple[TokenScore, ...] = ()
    #: The parts of a chat's text, if the model's features include REASONING or TOOL_CALLS.
    reasoning: str = ""
    content: str = ""
    #: Complete calls, with tools.
    tool_calls: tuple[ToolCall, ...] = ()
    #: With message_type, set with `finish` if the output is complete.
    message: Message | None = None
    #: Set with `finish`; None from an older server, which does not send it.
    usage: OutputUsage | None = None
    _parsed: Any = field(default=None, repr=False)

    @property
    def parsed(self) -> Any:
        """Output.parsed, once there is a `finish`; None before."""
        return unwrapped(self._parsed)


@dataclass(frozen=True, slots=True)
class Output:
    """One whole output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    #: One per token, with logprobs or score_token_ids.
    scores: tuple[TokenScore, ...] = ()
    #: The parts of a chat's text, if the model's features include REASONING or TOOL_CALLS.
    reasoning: str = ""
    content: str = ""
    #: Filled with tools.
    tool_calls: tuple[ToolCall, ...] = ()
    #: With message_type, a message of that type if the output is complete.
    message: Message | None = None
    #: None from an older server, which does not send it.
    usage: OutputUsage | None = None
    _parsed: Any = field(default=None, repr=False)

    @property
    def parsed(self) -> Any:
        """With a class as json_schema, its object; else None. Raise MessageMismatch if cut off or refused."""
        return unwrapped(self._parsed)


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole result of a call. `text`, `finish` and the like are those of the first output."""

    request_id: str
    model: str
    seed: int
    outputs: tuple[Output, ...]
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    prompt_token_ids: tuple[int, ...] = ()
    #: One per token of the prompt, with prompt_logprobs.
    prompt_scores: tuple[TokenScore, ...] = ()
    #: When the request arrived, in seconds since the epoch by the server's clock; 0.0 from an older server.
    create_time_s: float = 0.0
    #: The version of photon_grpc that answered, such as "0.1.0"; empty from an older server.
    release: str = ""
    #: Model.numerics_version of the server that answered; of the first one if a stream was resumed.
    numerics_version: str = ""
    #: False: it was resumed by a server that may compute other bits than the first (docs/numerics.md).
    is_bit_exact: bool = True

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.outputs[0].finish

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def content(self) -> str:
        return self.outputs[0].content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> Message | None:
        return self.outputs[0].message

    @property
    def parsed(self) -> Any:
        """Output.parsed of the first output."""
        return self.outputs[0].parsed


def read_delta(message: pb.Output, types: AnswerTypes = NO_TYPES, text_before: str = "") -> Delta:
    """Read a delta. `text_before` is the output's earlier text, needed only to make an object."""
    parts = _parts(message, types)
    if not message.HasField("finish"):
        return Delta(**parts)
    finish, usage = read_finish(message.finish), read_output_usage(message)
    return Delta(finish=finish, **parts, usage=usage, _parsed=_object(types, text_before + message.text, finish))


def read_start(message: pb.GenerationStart) -> Start:
    return Start(
        request_id=message.request_id,
        model=message.model,
        seed=message.seed,
        create_time_s=_seconds(message.create_time),
        prompt_token_ids=tuple(message.prompt.token_ids),
        prompt_scores=read_scores(message.prompt.scores),
        release=message.release,
        numerics_version=message.numerics_version,
    )


def read_generation(message: pb.GenerateResponse, types: AnswerTypes = NO_TYPES) -> Generation:
    return Generation(
        request_id=message.request_id,
        model=message.model,
        seed=message.seed,
        outputs=tuple(_read_output(output, types) for output in message.outputs),
        usage=read_usage(message.usage),
        timing=read_timing(message.timing),
        prompt_token_ids=tuple(message.prompt.token_ids),
        prompt_scores=read_scores(message.prompt.scores),
        create_time_s=_seconds(message.create_time),
        release=message.release,
        numerics_version=message.numerics_version,
    )


def _read_output(message: pb.Output, types: AnswerTypes) -> Output:
    finish = read_finish(message.finish)
    return Output(
        finish=finish,
        **_parts(message, types),
        usage=read_output_usage(message),
        _parsed=_object(types, message.text, finish),
    )


def _parts(message: pb.Output, types: AnswerTypes) -> dict[str, Any]:
    return {
        "index": message.index,
        "text": message.text,
        "token_ids": tuple(message.token_ids),
        "scores": read_scores(message.scores),
        "reasoning": message.reasoning,
        "content": message.content,
        "tool_calls": read_tool_calls(message.tool_calls),
        "message": read_message(message, types.message_type),
    }


def _object(types: AnswerTypes, text: str, finish: Finish) -> Any:
    if types.object_type is None:
        return None
    return parsed(types.object_type, text, finish.reason)


def read_scores(messages: Iterable[pb.TokenScore]) -> tuple[TokenScore, ...]:
    return tuple(
        TokenScore(
            message.token_id,
            message.logprob if message.HasField("logprob") else None,
            message.rank,
            message.token_bytes,
            tuple(Candidate(each.token_id, each.logprob, each.rank, each.token_bytes) for each in message.candidates),
        )
        for message in messages
    )


def read_tool_calls(messages: Iterable[pb.ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(message.index, message.name, message.arguments_json, message.id) for message in messages)


def read_finish(message: pb.Finish) -> Finish:
    matched = message.WhichOneof("matched")
    reason = enum_name(pb.FinishReason, message.reason, _REASON_PREFIX)
    return Finish(reason, **({matched: getattr(message, matched)} if matched else {}))


def read_output_usage(message: pb.Output) -> OutputUsage | None:
    if not message.HasField("usage"):
        return None
    usage = message.usage
    return OutputUsage(usage.output_tokens, usage.draft_tokens, usage.accepted_draft_tokens)


def read_usage(message: pb.Usage) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.cached_prompt_tokens,
        message.output_tokens,
        message.draft_tokens,
        message.accepted_draft_tokens,
    )


def read_timing(message: pb.Timing) -> Timing:
    return Timing(
        queue_s=_seconds(message.queue_duration),
        first_token_s=_seconds(message.first_token_duration),
        total_s=_seconds(message.total_duration),
        preemption_count=message.preemption_count,
    )


def _seconds(message: Duration | Timestamp) -> float:
    return message.ToNanoseconds() / 1e9
