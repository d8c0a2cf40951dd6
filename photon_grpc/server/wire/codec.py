"""Conversion of messages: GenerateRequest → Ask; Update and Result → messages. Unset fields stay unset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from photon_grpc.core.admission import check_count, check_labels, check_prompt
from photon_grpc.core.ask import (
    NOTHING_SET,
    UNWRITTEN,
    Ask,
    CacheAsk,
    ChatInput,
    ConstraintAsk,
    IdsInput,
    Origin,
    OutputAsk,
    SamplingAsk,
    SchedulingAsk,
    StopAsk,
    StreamAsk,
    TextInput,
)
from photon_grpc.core.field import Field
from photon_grpc.core.fields import FIELDS, fields_of
from photon_grpc.core.generation import OutputUsage, Start, Timing, Usage
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.frontend.output.answer import NO_ANSWER
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish, Result, Update
from photon_grpc.server.wire.chat import chat_of
from photon_grpc.server.wire.features import refuse_empty
from photon_grpc.v1 import inference_pb2 as pb

#: For messages that are not set, as most are, which saves reading their fields.
_NO_OUTPUT, _NO_SCHEDULING = NOTHING_SET.output, NOTHING_SET.scheduling
_NO_STREAM, _NO_CACHE = NOTHING_SET.stream, NOTHING_SET.cache
#: The largest google.protobuf.Duration, 10,000 years.
_MAX_DURATION_S = 315_576_000_000
_DURATIONS = tuple((field.group, field.name) for field in FIELDS.values() if field.unit == "s")


# --- message → Ask ---------------------------------------------------------------------------------------------------


def ask_of(request: pb.GenerateRequest, facts: ModelFacts, origin: Origin, *, replaces: bool = False) -> Ask:
    """Return the Ask in `request`; typed output has the grammar UNWRITTEN. Raise InvalidRequest.

    `origin` gets the labels, which observers see even if the request is refused for another field.
    """
    if request.labels:
        check_labels(request.labels)
        origin.labels = tuple(sorted(request.labels.items()))
    refuse_empty(request)
    _check_durations(request)
    has = request.HasField
    return Ask(
        input=input_of(request, facts),
        origin=origin,
        model=request.model,
        sampling=_sampling(request.sampling, facts),
        stop=_stop(request.stop, facts),
        output=_output(request.output, facts) if has("output") else _NO_OUTPUT,
        cache=_cache(request.cache, facts) if has("cache") else _NO_CACHE,
        scheduling=_scheduling(request.scheduling, facts) if has("scheduling") else _NO_SCHEDULING,
        stream=_stream(request.stream, facts) if has("stream") else _NO_STREAM,
        constraint=_constraint(request.structured_output),
        replaces=replaces,
        continue_from=_continued(request, facts),
    )


def _continued(request: pb.GenerateRequest, facts: ModelFacts) -> tuple[int, ...]:
    check_count(len(request.continue_from.ids), facts.max_context_tokens, "continue_from.ids")
    return _ids(request.continue_from)


def input_of(request: pb.GenerateRequest, facts: ModelFacts) -> TextInput | IdsInput | ChatInput | None:
    """Return the input of `request`; None if there is none.

    Raise PromptTooLong, InvalidRequest for a long input before it becomes objects: 32 MiB hold ten million of them,
    which would block the event loop.
    """
    match request.WhichOneof("input"):
        case "text":
            return TextInput(request.text, parse_special_tokens=request.parse_special_tokens)
        case "token_ids":
            check_prompt(len(request.token_ids.ids), facts.max_context_tokens, "token_ids.ids")
            return IdsInput(tuple(request.token_ids.ids[:]))  # slicing makes a list, which is faster to read
        case "chat":
            return chat_of(request.chat, facts)
        case _:
            return None


#: Name in the Ask, conversion of the value, and path and limit of a list.
_Column = tuple[str, Callable[[Any], Any] | None, str, Callable[[ModelFacts], int] | None]


class _Reader:
    """Reader of a group of options: makes the struct from the fields of the message that are set."""

    def __init__(self, group: str, struct: Callable[..., Any]) -> None:
        self._struct = struct
        in_proto = _message_of(group).fields_by_name
        self._columns = {
            in_proto[field.name].number: _column(in_proto[field.name], field) for field in fields_of(group)
        }

    def __call__(self, message: Message, facts: ModelFacts) -> Any:
        """Return the struct. Raise InvalidRequest for a list that is too long, before it becomes objects."""
        values = {}
        for field, value in message.ListFields():
            name, plain, path, limit = self._columns[field.number]
            if limit is not None:
                check_count(len(value.ids if plain is _ids else value), limit(facts), path)
            values[name] = value if plain is None else plain(value)
        return self._struct(**values)


def _column(field: FieldDescriptor, declared: Field) -> _Column:
    path, limit = declared.path, attrgetter(declared.max_items) if declared.max_items else None
    match field.message_type:
        case None:
            return declared.attribute, _tuple if field.is_repeated else None, path, limit
        case pb.TokenIds.DESCRIPTOR:
            return declared.attribute, _ids, f"{path}.ids", limit
        case Duration.DESCRIPTOR:
            return declared.attribute, _seconds, path, limit
        case _:  # a map
            return declared.attribute, lambda values: tuple(sorted(values.items())), path, limit


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values[:])  # slicing makes a list, which is faster to read


def _ids(message: pb.TokenIds) -> tuple[int, ...]:
    return _tuple(message.ids)


def _message_of(group: str) -> Descriptor:
    """Return the type of the message that holds a group of options; that of "" is GenerateRequest."""
    whole: Descriptor = pb.GenerateRequest.DESCRIPTOR
    return cast("Descriptor", whole.fields_by_name[group].message_type) if group else whole


def _constraint(output: pb.StructuredOutput) -> ConstraintAsk | None:
    match output.WhichOneof("constraint"):
        case "json_schema":
            return ConstraintAsk("json_schema", output.json_schema)
        case "json_object":
            return ConstraintAsk("json_object")
        case "regex":
            return ConstraintAsk("regex", output.regex)
        case "choices":
            return ConstraintAsk("choices", choices=tuple(output.choices.values))
        case "grammar":
            return ConstraintAsk("grammar", output.grammar)
        case "protobuf":
            return UNWRITTEN
        case _:
            return None


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9


_sampling = _Reader("sampling", SamplingAsk)
_stop = _Reader("stop", StopAsk)
_output = _Reader("output", OutputAsk)
_cache = _Reader("cache", CacheAsk)
_scheduling = _Reader("scheduling", SchedulingAsk)
_stream = _Reader("stream", StreamAsk)


def _check_durations(request: Message) -> None:
    found = [(f"{at}.{name}", _fault(getattr(request, at), name)) for at, name in _DURATIONS if request.HasField(at)]
    wrong = [(path, f"{path}: {fault}") for path, fault in found if fault]
    if wrong:
        error = InvalidRequest(wrong[0][1], field=wrong[0][0])
        error.also = tuple(wrong[1:])
        raise error


def _fault(options: Message, name: str) -> str:
    """Say what is wrong with a duration; "" if it is valid."""
    duration: Duration = getattr(options, name)
    if 0 <= duration.seconds <= _MAX_DURATION_S and 0 <= duration.nanos < 1_000_000_000:
        return ""
    bounds = f"must be at least 0 and at most {_MAX_DURATION_S} seconds, with nanos from 0 to 999999999"
    return f"{bounds}, is {duration.seconds} seconds and {duration.nanos} nanos"


# --- Update, Result → messages, without their scores ------------------------------------------------------------------


def stream_message(update: Update, sequence: int, start: Start | None) -> pb.StreamGenerateResponse:
    """Return message number `sequence` of a stream; only the first one has a `start`."""
    message = pb.StreamGenerateResponse(sequence=sequence)
    for delta in update.deltas:
        _fill_output(message.deltas.add(), delta)
    if start is not None:
        _fill_start(message.start, start)
    if update.usage is not None:
        _fill_usage(message.usage, update.usage)
    if update.timing is not None:
        _fill_timing(message.timing, update.timing)
    return message


def generate_response(result: Result) -> pb.GenerateResponse:
    start = result.start
    response = pb.GenerateResponse(
        request_id=start.request_id,
        model=start.model,
        prompt=pb.PromptInfo(token_ids=start.prompt_token_ids) if start.prompt_token_ids else None,
        seed=start.seed,
        release=start.release,
        numerics_version=start.numerics_version,
    )
    _fill_time(response.create_time, start.create_time_s)
    for output in result.outputs:
        _fill_output(response.outputs.add(), output)
    _fill_usage(response.usage, result.usage)
    _fill_timing(response.timing, result.timing)
    return response


def _fill_start(message: pb.GenerationStart, start: Start) -> None:
    message.request_id = start.request_id
    message.model = start.model
    _fill_time(message.create_time, start.create_time_s)
    message.seed = start.seed
    message.release = start.release
    message.numerics_version = start.numerics_version
    if start.prompt_token_ids:
        message.prompt.token_ids.extend(start.prompt_token_ids)


def _fill_output(message: pb.Output, delta: OutputDelta) -> None:
    message.index = delta.index
    message.text = delta.text
    message.token_ids.extend(delta.token_ids)
    if delta.answer is not NO_ANSWER:
        message.reasoning = delta.reasoning
        message.content = delta.content
        message.tool_calls.extend([pb.ToolCall(**asdict(call)) for call in delta.tool_calls])
    if delta.finish is not None:
        _fill_finish(message.finish, delta.finish)
    if delta.usage is not None:
        _fill_output_usage(message.usage, delta.usage)


def _fill_finish(message: pb.Finish, finish: OutputFinish) -> None:
    message.reason = cast("pb.FinishReason.ValueType", finish.reason)
    if finish.stop_string is not None:
        message.stop_string = finish.stop_string
    elif finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    elif finish.eos_token_id is not None:
        message.eos_token_id = finish.eos_token_id


def _fill_output_usage(message: pb.OutputUsage, usage: OutputUsage) -> None:
    message.SetInParent()  # also if the output has no token of this call
    message.output_tokens = usage.output_tokens
    message.draft_tokens = usage.draft_tokens
    message.accepted_draft_tokens = usage.accepted_draft_tokens


def _fill_usage(message: pb.Usage, usage: Usage) -> None:
    message.prompt_tokens = usage.prompt_tokens
    message.cached_prompt_tokens = usage.cached_prompt_tokens
    message.output_tokens = usage.output_tokens
    message.draft_tokens = usage.draft_tokens
    message.accepted_draft_tokens = usage.accepted_draft_tokens


def _fill_timing(message: pb.Timing, timing: Timing) -> None:
    _fill_time(message.queue_duration, timing.queue_s)
    _fill_time(message.first_token_duration, timing.first_token_s)
    _fill_time(message.total_duration, timing.total_s)
    message.preemption_count = timing.preemption_count


def _fill_time(message: Duration | Timestamp, seconds: float) -> None:
    message.seconds, message.nanos = _split(seconds)


def _split(seconds: float) -> tuple[int, int]:
    """Split non-negative seconds into whole seconds and nanoseconds."""
    whole = int(seconds)
    # The difference is exact; for times since the epoch `seconds * 1e9` is not.
    return whole, int((seconds - whole) * 1e9)
