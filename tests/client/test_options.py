"""Every option is written to the field of its name; a prompt is text, ids or a chat."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from photon_grpc.client.options import build_request, group_of
from photon_grpc.core.fields import Options
from photon_grpc.errors import InvalidRequest
from photon_grpc.v1 import inference_pb2 as pb

GROUPS = ("sampling", "stop", "structured_output", "output", "cache", "scheduling", "stream")
#: The caller sets it by a generated class, `message_type`.
DESCRIBED = {"protobuf"}


def test_the_options_are_exactly_the_fields_of_the_proto() -> None:
    fields = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    in_proto = {name for group in GROUPS for name in fields[group].message_type.fields_by_name} - DESCRIBED
    in_proto |= {"message_type", "model", "request_id", "parse_special_tokens", "continue_from", "labels"}
    in_proto |= set(fields["chat"].message_type.fields_by_name) - {"messages"}
    assert set(Options.__annotations__) == in_proto


@pytest.mark.parametrize(
    ("option", "field", "error"),
    [
        ({"labels": {"a": 1}}, "labels", "labels['a'] must be a str, is int 1"),
        ({"labels": {"a": b"x"}}, "labels", "labels['a'] must be a str, is bytes b'x'"),
        ({"labels": {1: "a"}}, "labels", "a key of labels must be a str, is int 1"),
        ({"labels": "x"}, "labels", "labels must be a mapping, is str 'x'"),
        ({"labels": ["a"]}, "labels", "labels must be a mapping, is list ['a']"),
        ({"logit_bias": 3}, "sampling.logit_bias", "sampling.logit_bias must be a mapping, is int 3"),
        ({"stop_strings": ["a", 1]}, "stop.stop_strings", "stop.stop_strings[1] must be a str, is int 1"),
        (
            {"choices": [None]},
            "structured_output.choices.values",
            "structured_output.choices.values[0] must be a str, is NoneType None",
        ),
    ],
)
def test_a_text_that_is_none_is_named(option: dict[str, Any], field: str, error: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        build_request("x", option)
    assert (str(raised.value), raised.value.field) == (error, field)


def test_no_option_belongs_to_two_groups() -> None:
    fields = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    names = [name for group in (*GROUPS, "chat") for name in fields[group].message_type.fields_by_name]
    assert len(names) == len(set(names))


def test_values_are_written_into_their_fields() -> None:
    request = build_request(
        "text",
        {
            "model": "m",
            "temperature": 0,
            "top_k": -1,
            "seed": 2**64 - 1,
            "logit_bias": {5: -1.5},
            "allowed_token_ids": [],
            "max_tokens": 0,
            "stop_strings": ["a", "b"],
            "max_duration": 1.25,
            "token_ids": True,
            "session_id": "s",
            "priority": -3,
            "max_tokens_per_message": 4,
            "min_p": None,
        },
    )
    assert request.text == "text"
    assert request.model == "m"
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0
    assert not request.sampling.HasField("min_p")
    assert request.sampling.seed == 2**64 - 1
    assert dict(request.sampling.logit_bias) == {5: -1.5}
    assert request.sampling.HasField("allowed_token_ids")
    assert request.stop.HasField("max_tokens")
    assert list(request.stop.stop_strings) == ["a", "b"]
    assert request.stop.max_duration.ToMilliseconds() == 1250
    assert request.output.token_ids is True
    assert request.cache.session_id == "s"
    assert request.scheduling.priority == -3
    assert request.stream.max_tokens_per_message == 4


def test_a_constraint_is_written_into_its_field_and_only_one_is_allowed() -> None:
    schema = {"type": "object", "title": "ü"}
    assert json.loads(build_request("", {"json_schema": schema}).structured_output.json_schema) == schema
    assert build_request("", {"json_schema": "{}"}).structured_output.json_schema == "{}"
    assert build_request("", {"json_object": True}).structured_output.WhichOneof("constraint") == "json_object"
    assert not build_request("", {"json_object": False}).HasField("structured_output")
    assert build_request("", {"choices": []}).structured_output.WhichOneof("constraint") == "choices"
    assert list(build_request("", {"choices": ("a", "b")}).structured_output.choices.values) == ["a", "b"]
    assert build_request("", {"grammar": 'start: "a"'}).structured_output.grammar == 'start: "a"'
    with pytest.raises(InvalidRequest, match="json_object is set, too"):
        build_request("", {"json_object": True, "regex": "a"})
    with pytest.raises(InvalidRequest, match="json_schema: is not JSON"):
        build_request("", {"json_schema": {"a": math.nan}})


def test_a_tool_choice_is_a_word_or_a_name() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert not build_request(chat, {"tool_choice": "auto"}).chat.HasField("tool_choice")
    assert build_request(chat, {"tool_choice": "required"}).chat.tool_choice.HasField("required")
    assert build_request(chat, {"tool_choice": "weather"}).chat.tool_choice.name == "weather"
    assert build_request(chat, {"tool_choice": ""}).chat.tool_choice.WhichOneof("choice") == "name"


def test_prompts() -> None:
    assert build_request("", {}).WhichOneof("input") == "text"
    assert list(build_request([1, 2], {}).token_ids.ids) == [1, 2]
    assert build_request([], {}).WhichOneof("input") == "token_ids"
    chat = build_request([{"role": "user", "content": "hi", "name": "n"}], {"add_generation_prompt": False}).chat
    assert (chat.messages[0].role, chat.messages[0].content, chat.messages[0].name) == ("user", "hi", "n")
    assert chat.HasField("add_generation_prompt")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", {"max_tokens": -1}, "stop.max_tokens"),
        ("x", {"max_tokens": "many"}, "stop.max_tokens"),
        ("x", {"seed": 2**64}, "sampling.seed"),
        ("x", {"stop_strings": [1]}, "stop.stop_strings"),
        ("x", {"timeout": math.nan}, "scheduling.timeout"),
        ("x", {"logprobs": True}, "output.logprobs"),
        ("x", {"temperature": False}, "sampling.temperature"),
        ("x", {"tools_json": "[]"}, "chat.tools_json"),
        ("x", {"tool_choice": "auto"}, "chat.tool_choice"),
        ([{"role": "user", "content": "hi"}], {"tool_choice": 3}, "chat.tool_choice.name"),
        ([1, -1], {}, "token_ids.ids"),
        ([{"role": "user", "text": "hi"}], {}, "chat.messages[0].text"),
        ([{"role": "user", "content": 3}], {}, "chat.messages[0].content"),
        ([{"role": "user"}, 5], {}, "chat.messages[1]"),
        (5, {}, "input"),
        (math.nan, {}, "input"),
        (b"x", {}, "input"),
        ({"role": "user"}, {}, "input"),
        ("\ud800", {}, "text"),
        ([{"role": "user", "content": "\ud800"}], {}, "chat.messages[0].content"),
        ("x", {"stop_strings": ["\ud800"]}, "stop.stop_strings"),
        ("x", {"session_id": "\ud800"}, "cache.session_id"),
        ("x", {"stop_strings": "END"}, "stop.stop_strings"),
        ("x", {"choices": "yes"}, "structured_output.choices.values"),
    ],
)
def test_a_value_that_a_field_cannot_hold_is_named(prompt: object, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        build_request(prompt, options)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        group_of("max_token")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("stop", "stop= is called stop_strings= here"),
        ("n", "n= is called num_outputs= here"),
        ("max_completion_tokens", "max_completion_tokens= is called max_tokens= here"),
        ("top_logprobs", "top_logprobs= is called logprobs= here"),
        ("functions", "functions= is called tools= here"),
        ("guided_regex", "guided_regex= is called regex= here"),
        ("messages", "the messages of a chat are the prompt"),
        ("response_format", "json_schema= takes a schema or a class"),
        ("stream", r"stream\(...\) gives an output as it is produced"),
        ("extra_headers", "metadata of the client goes with every call"),
        ("echo", "the prompt is not repeated in the output"),
        ("best_of", "num_outputs= samples several outputs"),
        ("do_sample", "temperature=0 always takes the most probable token"),
        ("user", "session_id= names a conversation"),
        ("suffix", "filling in the middle is not supported"),
        ("length_penalty", "there is no beam search"),
        ("xyzzy", "there is no option 'xyzzy'$"),
    ],
)
def test_names_of_other_apis_are_translated_in_the_error(name: str, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        build_request("x", {name: 1})


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]], [[{"role": "user", "content": "a"}]], [["a"]]])
def test_a_list_of_prompts_is_refused_with_a_pointer_to_map(prompts: Any) -> None:
    with pytest.raises(TypeError, match=rf"one prompt, not a list of {len(prompts)}; client.map\(prompts"):
        build_request(prompts, {})


@dataclasses.dataclass
class _City:
    name: str


@pytest.mark.parametrize(
    ("schema", "problem"), [(_City("Bern"), "pass the class: json_schema=_City"), (list[_City], "is not a class")]
)
def test_an_object_is_not_a_schema(schema: object, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        build_request("", {"json_schema": schema})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("speculation", -1, "scheduling.speculation: must lie between 0 and 7, is -1"),
        ("max_tokens", -3, "stop.max_tokens: must be at least 1, is -3"),
        ("seed", 2**64, "sampling.seed: must lie between 0 and 18446744073709551615, is 18446744073709551616"),
    ],
)
def test_a_number_that_the_wire_cannot_hold_is_refused_as_the_server_refuses(
    option: str, value: int, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build_request("a", {option: value})
    assert str(refused.value) == words
