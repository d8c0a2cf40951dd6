"""Messages to plain data and back: GenerateRequest → Ask; Update and Result → messages. Unset stays unset."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from photon_grpc.core.admission import check_count, check_prompt
from photon_grpc.core.generation import Start, Timing, Usage
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.answer import NO_ANSWER
from photon_grpc.frontend.ask import (
    UNWRITTEN,
    Ask,
    CacheAsk,
    ChatInput,
    ChatMessage,
    ConstraintAsk,
    IdsInput,
    Origin,
    OutputAsk,
    SamplingAsk,
    SchedulingAsk,
    StopAsk,
    StreamAsk,
    TextInput,
    ToolChoice,
)
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.frontend.update import OutputDelta, OutputFinish, Result, Update
from photon_grpc.server.features import refuse_empty
from photon_grpc.v1 import inference_pb2 as pb

#: Of messages that are not set, as most are: reading their fields one by one would tell nothing else.
_NO_OUTPUT, _NO_SCHEDULING, _NO_STREAM, _NO_CACHE = OutputAsk(), SchedulingAsk(), StreamAsk(), CacheAsk()
#: Of one conversation: some 10 ms to make them into plain data.
_MAX_MESSAGES = 4096
#: google.protobuf.Duration ends here: 10,000 years.
_MAX_DURATION_S = 315_576_000_000
_DURATIONS = (
    ("stop", "max_duration"),
    ("scheduling", "max_queue_duration"),
    ("scheduling", "timeout"),
    ("stream", "min_interval"),
)


# --- message → Ask ---------------------------------------------------------------------------------------------------


def ask_of(
    request: pb.GenerateRequest,
    facts: ModelFacts,
    origin: Origin,
    *,
    replaces: bool = False,
) -> Ask:
    """The Ask in `request`, for the model with these `facts`. The grammar of typed output is UNWRITTEN.

    Raise InvalidRequest for an invalid Duration and for lists that are too long.
    """
    refuse_empty(request)
    _check_counts(request, facts)
    _check_durations(request)
    has = request.HasField
    return Ask(
        input=_input(request),
        origin=origin,
        model=request.model,
        sampling=_sampling(request.sampling),
        stop=_stop(request.stop),
        output=_output(request.output) if has("output") else _NO_OUTPUT,
        cache=_cache(request.cache) if has("cache") else _NO_CACHE,
        scheduling=_scheduling(request.scheduling) if has("scheduling") else _NO_SCHEDULING,
        stream=_stream(request.stream) if has("stream") else _NO_STREAM,
        constraint=_constraint(request.structured_output),
        replaces=replaces,
        continue_from=tuple(request.continue_from.ids),
    )


def check_messages(chat: pb.ChatInput, facts: ModelFacts) -> None:
    # Every message of a conversation renders to one token at least.
    check_count(len(chat.messages), min(facts.max_context_tokens, _MAX_MESSAGES), "chat.messages")


def _check_counts(request: pb.GenerateRequest, facts: ModelFacts) -> None:
    """Refuse a list before it becomes objects: 32 MiB hold ten million of them, which would block the event loop."""
    check_prompt(len(request.token_ids.ids), facts.max_context_tokens, "token_ids.ids")
    check_messages(request.chat, facts)
    check_count(len(request.continue_from.ids), facts.max_context_tokens, "continue_from.ids")
    check_count(len(request.stop.stop_strings), facts.limits.max_stop_strings, "stop.stop_strings")
    check_count(len(request.stop.stop_token_ids), facts.vocab_size, "stop.stop_token_ids")
    check_count(len(request.output.score_token_ids.ids), facts.limits.max_logprobs, "output.score_token_ids.ids")
    check_count(len(request.sampling.logit_bias), facts.limits.max_logit_bias, "sampling.logit_bias")
    allowed = request.sampling.allowed_token_ids.ids
    check_count(len(allowed), facts.vocab_size, "sampling.allowed_token_ids.ids")


def _input(request: pb.GenerateRequest) -> TextInput | IdsInput | ChatInput | None:
    match request.WhichOneof("input"):
        case "text":
            return TextInput(request.text, parse_special_tokens=request.parse_special_tokens)
        case "token_ids":
            return IdsInput(tuple(request.token_ids.ids))
        case "chat":
            return chat_of(request.chat)
        case _:
            return None


def chat_of(chat: pb.ChatInput) -> ChatInput:
    return ChatInput(
        messages=tuple(
            ChatMessage(m.role, m.content, m.name, m.tool_call_id, m.tool_calls_json) for m in chat.messages
        ),
        template_args_json=chat.template_args_json,
        tools_json=chat.tools_json,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        tool_choice=_tool_choice(chat.tool_choice) if chat.HasField("tool_choice") else None,
    )


def _tool_choice(choice: pb.ToolChoice) -> ToolChoice:
    return ToolChoice(choice.name if choice.WhichOneof("choice") == "name" else None)


def _sampling(sampling: pb.SamplingParams) -> SamplingAsk:
    has = sampling.HasField
    return SamplingAsk(
        temperature=sampling.temperature if has("temperature") else None,
        top_p=sampling.top_p if has("top_p") else None,
        top_k=sampling.top_k if has("top_k") else None,
        min_p=sampling.min_p if has("min_p") else None,
        repetition_penalty=sampling.repetition_penalty if has("repetition_penalty") else None,
        presence_penalty=sampling.presence_penalty if has("presence_penalty") else None,
        frequency_penalty=sampling.frequency_penalty if has("frequency_penalty") else None,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids.ids) if has("allowed_token_ids") else None,
        seed=sampling.seed if has("seed") else None,
        num_outputs=sampling.num_outputs if has("num_outputs") else None,
    )


def _stop(stop: pb.StopParams) -> StopAsk:
    return StopAsk(
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        min_tokens=stop.min_tokens if stop.HasField("min_tokens") else None,
        stop_strings=tuple(stop.stop_strings),
        stop_token_ids=tuple(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop_in_text=stop.include_stop_in_text,
        max_duration_s=_seconds(stop.max_duration) if stop.HasField("max_duration") else None,
    )


def _output(output: pb.OutputOptions) -> OutputAsk:
    return OutputAsk(
        text=output.text if output.HasField("text") else None,
        token_ids=output.token_ids,
        prompt_token_ids=output.prompt_token_ids,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        score_token_ids=tuple(output.score_token_ids.ids) if output.HasField("score_token_ids") else None,
    )


def _constraint(wanted: pb.StructuredOutput) -> ConstraintAsk | None:
    match wanted.WhichOneof("constraint"):
        case "json_schema":
            return ConstraintAsk("json_schema", wanted.json_schema)
        case "json_object":
            return ConstraintAsk("json_object")
        case "regex":
            return ConstraintAsk("regex", wanted.regex)
        case "choices":
            return ConstraintAsk("choices", choices=tuple(wanted.choices.values))
        case "grammar":
            return ConstraintAsk("grammar", wanted.grammar)
        case "protobuf":
            return UNWRITTEN
        case _:
            return None


def _cache(cache: pb.CacheOptions) -> CacheAsk:
    return CacheAsk(cache.session_id, cache.salt, cache.bypass_prefix_cache)


def _scheduling(scheduling: pb.SchedulingOptions) -> SchedulingAsk:
    has = scheduling.HasField
    return SchedulingAsk(
        priority=scheduling.priority,
        max_queue_duration_s=_seconds(scheduling.max_queue_duration) if has("max_queue_duration") else None,
        timeout_s=_seconds(scheduling.timeout) if has("timeout") else None,
    )


def _stream(stream: pb.StreamOptions) -> StreamAsk:
    return StreamAsk(
        min_interval_s=_seconds(stream.min_interval),
        max_tokens_per_message=stream.max_tokens_per_message if stream.HasField("max_tokens_per_message") else None,
        continuous_usage=stream.continuous_usage,
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9


def _check_durations(request: Message) -> None:
    wrong = [
        f"{name}.{field}"
        for name, field in _DURATIONS
        if request.HasField(name) and not _is_valid(getattr(request, name), field)
    ]
    if wrong:
        text = f"must be a google.protobuf.Duration of at least 0 and at most {_MAX_DURATION_S} seconds"
        error = InvalidRequest(f"{wrong[0]} {text}", field=wrong[0])
        error.also = tuple((path, f"{path} {text}") for path in wrong[1:])
        raise error


def _is_valid(options: Message, field: str) -> bool:
    duration: Duration = getattr(options, field)
    return 0 <= duration.seconds <= _MAX_DURATION_S and 0 <= duration.nanos < 1_000_000_000


# --- Update, Result → messages, but for scores ------------------------------------------------------------------------


def stream_message(update: Update, sequence: int, start: Start | None) -> pb.StreamGenerateResponse:
    """The message number `sequence` of a stream; `start` belongs to the first one only."""
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
    )
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


def _fill_finish(message: pb.Finish, finish: OutputFinish) -> None:
    message.reason = cast("pb.FinishReason.ValueType", finish.reason)
    if finish.stop_string is not None:
        message.stop_string = finish.stop_string
    elif finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    elif finish.eos_token_id is not None:
        message.eos_token_id = finish.eos_token_id


def _fill_usage(message: pb.Usage, usage: Usage) -> None:
    message.prompt_tokens = usage.prompt_tokens
    message.cached_prompt_tokens = usage.cached_prompt_tokens
    message.output_tokens = usage.output_tokens


def _fill_timing(message: pb.Timing, timing: Timing) -> None:
    _fill_time(message.queue_duration, timing.queue_s)
    _fill_time(message.first_token_duration, timing.first_token_s)
    _fill_time(message.total_duration, timing.total_s)
    message.preemption_count = timing.preemption_count


def _fill_time(message: Duration | Timestamp, seconds: float) -> None:
    message.seconds, message.nanos = _split(seconds)


def _split(seconds: float) -> tuple[int, int]:
    """Non-negative seconds as whole seconds and nanoseconds."""
    whole = int(seconds)
    # The difference is exact, which `seconds * 1e9` is not for times since the epoch.
    return whole, int((seconds - whole) * 1e9)
