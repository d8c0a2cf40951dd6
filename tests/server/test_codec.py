"""Nothing that a caller sets is ignored: it reaches the Ask or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from photon_grpc.core.ask import Ask, ChatInput, ChatMessage, IdsInput, Origin, TextInput, ToolChoice
from photon_grpc.core.generation import OutputUsage, Start, Timing, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidRequest, PromptTooLong
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish, Result, Update
from photon_grpc.server.wire import codec
from photon_grpc.server.wire.chat import chat_of
from photon_grpc.v1 import inference_pb2 as pb
from tests.server.fake_frontend import facts

START = Start("r1", "demo", 2**64 - 1, 1_700_000_000.25, (4, 5))


def ask_of(request: pb.GenerateRequest) -> Ask:
    return codec.ask_of(request, facts("demo"), Origin(1.0, request.request_id or "id"))


def leaf_paths(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """Yield the path of every field of a request that holds a value."""
    for field in descriptor.fields:
        path = prefix + field.name
        is_plain = field.message_type is None or field.is_repeated
        if is_plain or field.message_type.full_name in ("google.protobuf.Duration", "photon_grpc.v1.TokenIds"):
            yield path
        else:
            yield from leaf_paths(field.message_type, path + ".")


def assign(message: Message, path: str) -> None:
    """Set the field at `path` to a value that is not neutral."""
    *parents, leaf = path.split(".")
    for name in parents:
        getattr(message, name).SetInParent()
        message = getattr(message, name)
    field = message.DESCRIPTOR.fields_by_name[leaf]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = ("a", "x") if leaf == "labels" else (1, 1.0)
        getattr(message, leaf)[key] = value
    elif field.message_type is not None and field.is_repeated:
        getattr(message, leaf).add()
    elif field.message_type is not None:
        fill(getattr(message, leaf))
    elif field.is_repeated:
        getattr(message, leaf).append("x" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 3)
    else:
        setattr(message, leaf, VALUES[field.cpp_type])


def fill(message: Message) -> None:
    message.SetInParent()
    if message.DESCRIPTOR.name == "Duration":
        message.FromMilliseconds(1500)
    if message.DESCRIPTOR.name == "TokenIds":
        message.ids.append(3)


VALUES = {
    FieldDescriptor.CPPTYPE_STRING: "x",
    FieldDescriptor.CPPTYPE_FLOAT: 0.75,
    FieldDescriptor.CPPTYPE_INT32: 3,
    FieldDescriptor.CPPTYPE_UINT32: 3,
    FieldDescriptor.CPPTYPE_UINT64: 3,
    FieldDescriptor.CPPTYPE_BOOL: True,
}

#: `structured_output.protobuf` reaches the Ask as a MessageType (test_message_type).
PATHS = [
    path for path in leaf_paths(pb.GenerateRequest.DESCRIPTOR) if not path.startswith("structured_output.protobuf")
]


@pytest.mark.parametrize("path", PATHS)
def test_every_field_is_obeyed_or_refused_by_name(path: str) -> None:
    plain = pb.GenerateRequest(text="hi")
    if path.startswith("chat"):
        plain = pb.GenerateRequest(chat=pb.ChatInput())
    if path in ("output.skip_special_tokens", "chat.add_generation_prompt", "output.text"):
        pytest.skip("True is what unset means")
    request = pb.GenerateRequest()
    request.CopyFrom(plain)
    assign(request, path)
    assert ask_of(request) != ask_of(plain)


def test_booleans_that_are_true_when_unset_can_be_false() -> None:
    request = pb.GenerateRequest(output=pb.OutputOptions(skip_special_tokens=False, text=False))
    assert ask_of(request).output.skip_special_tokens is False
    assert ask_of(request).output.text is False
    chat = chat_of(pb.ChatInput(add_generation_prompt=False), facts("demo"))
    assert chat.add_generation_prompt is False
    assert chat_of(pb.ChatInput(), facts("demo")).add_generation_prompt is True


def test_unset_stays_unset_and_a_set_zero_is_a_zero() -> None:
    ask = ask_of(pb.GenerateRequest())
    assert ask.input is None
    assert ask.sampling.temperature is None
    assert ask.stop.max_tokens is None
    assert ask.stop.max_duration_s is None
    zeros = pb.SamplingParams(temperature=0, top_p=0, top_k=0, min_p=0, seed=0, num_outputs=0)
    sampling = ask_of(pb.GenerateRequest(sampling=zeros)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0, 0, 0)
    assert (sampling.seed, sampling.num_outputs) == (0, 0)


def test_neutral_penalties_are_set_and_no_biases_are_none() -> None:
    neutral = pb.SamplingParams(repetition_penalty=1, presence_penalty=0, allowed_token_ids=pb.TokenIds())
    sampling = ask_of(pb.GenerateRequest(sampling=neutral)).sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, None)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ((), ())


def test_more_biases_than_allowed_are_refused_before_they_are_read() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_of(pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))))
    assert (caught.value.field, caught.value.needed, caught.value.limit) == ("sampling.logit_bias", 1025, 1024)


def test_zero_logprobs_count_as_set_and_an_empty_id_list_too() -> None:
    options = pb.OutputOptions(logprobs=0, prompt_logprobs=0, score_token_ids=pb.TokenIds())
    output = ask_of(pb.GenerateRequest(output=options)).output
    assert (output.logprobs, output.prompt_logprobs, output.score_token_ids) == (0, 0, ())


def test_a_structured_output_without_constraint_is_wrong() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_of(pb.GenerateRequest(structured_output=pb.StructuredOutput()))
    assert caught.value.field == "structured_output.constraint"


def test_tool_choices() -> None:
    def choice(chosen: pb.ToolChoice | None) -> ToolChoice | None:
        chat = ask_of(pb.GenerateRequest(chat=pb.ChatInput(tools_json="[1]", tool_choice=chosen))).input
        assert isinstance(chat, ChatInput)
        return chat.tool_choice

    assert choice(None) is None
    assert choice(pb.ToolChoice(required=pb.ToolChoice.Required())) == ToolChoice()
    assert choice(pb.ToolChoice(name="required")) == ToolChoice("required")
    assert choice(pb.ToolChoice(name="")) == ToolChoice("")
    with pytest.raises(InvalidRequest, match="names no choice") as caught:
        choice(pb.ToolChoice())
    assert caught.value.field == "chat.tool_choice.choice"


def test_inputs() -> None:
    text = pb.GenerateRequest(text="a\u0000b", parse_special_tokens=True)
    assert ask_of(text).input == TextInput("a\u0000b", parse_special_tokens=True)
    assert ask_of(pb.GenerateRequest(text="")).input == TextInput("")
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 2**32 - 1]))
    assert ask_of(ids).input == IdsInput((0, 2**32 - 1))
    message = pb.ChatMessage(role="tool", content="c", name="n", tool_call_id="t", tool_calls_json="[]")
    chat = pb.ChatInput(messages=[message], template_args_json="{}", tools_json="[1]")
    expected = ChatInput((ChatMessage("tool", "c", "n", "t", "[]"),), "{}", "[1]")
    assert ask_of(pb.GenerateRequest(chat=chat)).input == expected


TOO_MANY = {
    "token_ids.ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(4096))),
    "chat.messages": pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage()] * 4097)),
    "stop.stop_strings": pb.GenerateRequest(stop=pb.StopParams(stop_strings=["a"] * 65)),
    "stop.stop_token_ids": pb.GenerateRequest(stop=pb.StopParams(stop_token_ids=[1] * 101)),
    "output.score_token_ids.ids": pb.GenerateRequest(
        output=pb.OutputOptions(score_token_ids=pb.TokenIds(ids=[1] * 21))
    ),
}


@pytest.mark.parametrize("field", TOO_MANY)
def test_lists_too_long_for_any_request_are_refused_without_reading_them(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_of(TOO_MANY[field])
    assert caught.value.field == field
    assert caught.value.needed > caught.value.limit
    assert isinstance(caught.value, PromptTooLong) == (field == "token_ids.ids")


def test_the_longest_allowed_lists_are_read() -> None:
    stop = pb.StopParams(stop_strings=["a"] * 64, stop_token_ids=[1] * 100)
    ask = ask_of(pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(4095)), stop=stop))
    assert ask.input == IdsInput(tuple(range(4095)))


DURATIONS = ("stop.max_duration", "scheduling.max_queue_duration", "scheduling.timeout", "stream.min_interval")


def with_duration(path: str, seconds: int, nanos: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="hi")
    parent, leaf = path.split(".")
    duration = getattr(getattr(request, parent), leaf)
    duration.seconds, duration.nanos = seconds, nanos
    return request


@pytest.mark.parametrize("path", DURATIONS)
@pytest.mark.parametrize(
    ("seconds", "nanos"), [(-1, 0), (0, -1), (0, 10**9), (2**63 - 1, 0), (-(2**63), 0), (315_576_000_001, 0), (1, -1)]
)
def test_invalid_durations_are_named(path: str, seconds: int, nanos: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_of(with_duration(path, seconds, nanos))
    assert caught.value.field == path
    assert caught.value.message.startswith(f"{path}: ")
    assert caught.value.message.endswith(f"is {seconds} seconds and {nanos} nanos")


def test_all_invalid_durations_are_reported_together() -> None:
    request = pb.GenerateRequest()
    for path in DURATIONS:
        request.MergeFrom(with_duration(path, -1, 0))
    with pytest.raises(InvalidRequest) as caught:
        ask_of(request)
    assert (caught.value.field, *(path for path, _ in caught.value.also)) == DURATIONS


def test_durations_become_seconds() -> None:
    request = with_duration("stop.max_duration", 1, 500_000_000)
    request.MergeFrom(with_duration("scheduling.max_queue_duration", 0, 0))
    request.MergeFrom(with_duration("scheduling.timeout", 315_576_000_000, 0))
    request.MergeFrom(with_duration("stream.min_interval", 0, 20_000_000))
    request.scheduling.max_queue_duration.SetInParent()
    ask = ask_of(request)
    assert ask.stop.max_duration_s == 1.5
    assert (ask.scheduling.max_queue_duration_s, ask.scheduling.timeout_s) == (0.0, 315_576_000_000)
    assert ask.stream.min_interval_s == pytest.approx(0.02)


def test_finish_reasons_have_the_numbers_of_the_proto() -> None:
    wire = {name.removeprefix("FINISH_REASON_"): number for name, number in pb.FinishReason.items()}
    assert wire == {reason.name: reason.value for reason in FinishReason}


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason])
def test_a_finish_keeps_its_reason(reason: FinishReason) -> None:
    message = codec.stream_message(Update((OutputDelta(0, finish=OutputFinish(reason)),)), 1, None)
    assert message.deltas[0].finish.reason == reason.value
    assert message.deltas[0].finish.WhichOneof("matched") is None


@pytest.mark.parametrize(
    ("finish", "matched"),
    [
        (OutputFinish(FinishReason.STOP_STRING, stop_string="\n\n"), ("stop_string", "\n\n")),
        (OutputFinish(FinishReason.STOP_TOKEN, stop_token_id=0), ("stop_token_id", 0)),
        (OutputFinish(FinishReason.EOS, eos_token_id=0), ("eos_token_id", 0)),
    ],
)
def test_a_finish_reports_what_matched(finish: OutputFinish, matched: tuple[str, object]) -> None:
    message = codec.stream_message(Update((OutputDelta(0, finish=finish),)), 1, None).deltas[0].finish
    kind = message.WhichOneof("matched")
    assert (kind, getattr(message, kind)) == matched


def test_a_stream_message_says_only_what_is_new() -> None:
    message = codec.stream_message(Update((OutputDelta(0, "é"), OutputDelta(3, "", (7, 8)))), 9, None)
    expected = pb.StreamGenerateResponse(
        deltas=[pb.Output(index=0, text="é"), pb.Output(index=3, token_ids=[7, 8])], sequence=9
    )
    assert message == expected


def test_first_and_last_message() -> None:
    update = Update((OutputDelta(0, "a"),), Usage(1, 2, 3), Timing(0.25, 0.5, 1.75, 4))
    message = codec.stream_message(update, 1, START)
    assert (message.start.request_id, message.start.model, message.start.seed) == ("r1", "demo", 2**64 - 1)
    assert message.start.create_time.ToMilliseconds() == 1_700_000_000_250
    assert list(message.start.prompt.token_ids) == [4, 5]
    assert message.usage == pb.Usage(prompt_tokens=1, cached_prompt_tokens=2, output_tokens=3)
    durations = (message.timing.queue_duration, message.timing.first_token_duration, message.timing.total_duration)
    assert [duration.ToMilliseconds() for duration in durations] == [250, 500, 1750]
    assert message.timing.preemption_count == 4


def test_the_whole_result_has_everything() -> None:
    result = Result(
        START,
        (OutputDelta(0, "a", (1,), OutputFinish(FinishReason.EOS)), OutputDelta(1, "b")),
        Usage(1, 0, 2),
        Timing(),
    )
    response = codec.generate_response(result)
    assert (response.request_id, response.model, response.seed) == ("r1", "demo", 2**64 - 1)
    assert [(output.index, output.text) for output in response.outputs] == [(0, "a"), (1, "b")]
    assert response.usage.output_tokens == 2
    assert response.HasField("timing")
    assert list(response.prompt.token_ids) == [4, 5]
    bare = codec.generate_response(Result(Start("r", "m", 1, 0.0), ()))
    assert response.create_time.ToMilliseconds() == 1_700_000_000_250
    assert not response.outputs[0].HasField("usage")
    assert not bare.HasField("prompt")


def test_an_output_that_ends_has_its_usage_even_if_it_is_0() -> None:
    deltas = tuple([OutputDelta(at, finish=OutputFinish(FinishReason.EOS), usage=OutputUsage(at)) for at in range(2)])
    start = Start("r", "m", 1, 0.0, release="1.2.3")
    response = codec.generate_response(Result(start, deltas))
    message = codec.stream_message(Update(deltas), 1, start)
    for outputs in (response.outputs, message.deltas):
        assert [output.HasField("usage") for output in outputs] == [True, True]
        assert [output.usage.output_tokens for output in outputs] == [0, 1]
    assert response.release == message.start.release == "1.2.3"
