"""Messages of a caller's class: whole, as they grow, and as the arguments of tools."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, struct_pb2, timestamp_pb2
from google.protobuf.json_format import MessageToDict, MessageToJson, Parse
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.client import (
    Client,
    MessageMismatch,
    SyncClient,
    ToolCall,
    WrongMessageType,
    read_tool_message,
    tools_json,
    unpack,
)
from photon_grpc.client.message_type import find_message_type
from photon_grpc.client.options import build_request
from photon_grpc.client.partial_json import PartialJson
from photon_grpc.errors import InternalFailure, InvalidRequest
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from tests.examples import examples

from .described import NAME, descriptor_set
from .fake_server import FakeServer, message, serving, serving_in_a_thread, typed

JSON = '{"name":"a\\"b","aliases":["b","c"],"maxContextTokens":512,"limits":{"maxStopStrings":4}}'
MODEL = model_pb2.Model(name='a"b', aliases=["b", "c"], max_context_tokens=512)
MODEL.limits.max_stop_strings = 4

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(max_examples=examples(40))
@given(st.dictionaries(st.text(), values), st.booleans(), st.integers(1, 5))
def test_a_partial_text_is_valid_json_at_any_time(value: Any, ascii_only: bool, size: int) -> None:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only)
    partial, before = PartialJson(struct_pb2.Struct), "{}"
    while text:
        partial.add(text[:size])
        text = text[size:]
        known = partial.complete()
        assert_within(json.loads(before), json.loads(known))
        before = known
        assert_within(json.loads(before), value)
    assert json.loads(before) == value


def assert_within(part: Any, whole: Any) -> None:
    """Check that `whole` contains all of `part`; its texts, lists and objects may be longer."""
    if isinstance(part, dict):
        for key, each in part.items():
            assert_within(each, whole[key])
    elif isinstance(part, list):
        for one, other in zip(part, whole[: len(part)], strict=True):
            assert_within(one, other)
    elif isinstance(part, str):
        assert whole.startswith(part)
    else:
        assert part == whole


RICH = model_pb2.Model(
    name='R"1\\7 \U0001f600\n\u2028',
    aliases=["", "b{[", "Zürich \\u0020"],
    state=model_pb2.MODEL_STATE_READY,
    features=[model_pb2.FEATURE_CHAT, model_pb2.FEATURE_LOGPROBS],
    limits=model_pb2.Limits(max_stop_strings=4),
)
SAMPLING = pb.SamplingParams(temperature=0.5, logit_bias={1: 2.5, 7: -1}, seed=1 << 63)
START = pb.GenerationStart(request_id="r-1", create_time=timestamp_pb2.Timestamp(seconds=1_714_694_400), seed=12)
NODE = struct_pb2.Struct()
NODE.update({"a]}": [{"b{[": "text", "c": None}, 1.5], "": ",", "d": {"d": True}})


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    "whole", [RICH, SAMPLING, START, NODE, model_pb2.Model()], ids=lambda each: type(each).__name__
)
def test_every_prefix_of_a_message_parses(whole: Message, ascii_only: bool, indent: int | None) -> None:
    """No message holds less than the previous one, or an incomplete value other than a text."""
    text = MessageToJson(whole, indent=indent, ensure_ascii=ascii_only)
    partial, before = PartialJson(type(whole)), type(whole)()
    for character in text:
        partial.add(character)
        message = Parse(partial.complete(), type(whole)())
        assert_begins(before, message)
        assert_begins(message, whole)
        before = message
    assert before == whole


def assert_begins(part: Message, whole: Message) -> None:
    assert_within(MessageToDict(part), MessageToDict(whole))


def test_a_text_grows_and_a_number_waits() -> None:
    partial = PartialJson(pb.GenerationStart)
    partial.add('{"requestId":"r-')
    assert partial.complete() == '{"requestId":"r-"}'
    partial.add("1\\ud83d\\ude")
    assert partial.complete() == '{"requestId":"r-1"}'
    partial.add('00","seed":"12')
    assert json.loads(partial.complete()) == {"requestId": "r-1\U0001f600"}
    partial.add('3","createTime":"2024-05-03T')
    assert json.loads(partial.complete()) == {"requestId": "r-1\U0001f600", "seed": "123"}


def test_half_a_surrogate_pair_ends_with_its_string() -> None:
    partial = PartialJson(pb.GenerationStart)
    partial.add('{"requestId":"\\ud83d","model":"a')
    assert json.loads(partial.complete())["model"] == "a"


def script(reason: int = pb.FINISH_REASON_EOS, *, whole: bool = True) -> list[pb.StreamGenerateResponse]:
    pieces = [message(JSON[at : at + 3], start=at == 0) for at in range(0, len(JSON), 3)]
    last = message("", finish=reason)
    if whole:
        last.deltas[0].message.CopyFrom(typed(MODEL))
    return [*pieces, last]


async def test_a_message_fills_while_it_is_written() -> None:
    async with serving(FakeServer(script(), script()[-1:])) as fake, Client(fake.target) as client:
        seen = [each async for each in client.stream_messages("x", model_pb2.Model, max_tokens=9)]
        assert await client.generate_message("x", model_pb2.Model) == MODEL
    assert [each.name for each in seen[:2]] == ['a"', 'a"b']
    assert seen[-1] == MODEL and all(type(each) is model_pb2.Model for each in seen)
    for before, after in pairwise(seen):
        assert_within(MessageToDict(before), MessageToDict(after))
    assert all(before != after for before, after in pairwise(seen[:-1]))
    assert fake.requests[0].structured_output.protobuf.message_type == "photon_grpc.v1.Model"
    assert fake.requests[0].stop.max_tokens == 9


async def test_a_message_keeps_growing_when_a_map_repeats_a_key() -> None:
    text = '{"logitBias":{"5":1,"5":2,"7":3,"7":4},"seed":"9"}'
    whole = pb.SamplingParams(logit_bias={5: 2, 7: 4}, seed=9)
    pieces = [message(text[at : at + 3], start=at == 0) for at in range(0, len(text), 3)]
    last = message("", finish=pb.FINISH_REASON_EOS)
    last.deltas[0].message.CopyFrom(typed(whole))
    async with serving(FakeServer([*pieces, last])) as fake, Client(fake.target) as client:
        seen = [each async for each in client.stream_messages("x", pb.SamplingParams)]
    assert seen[-1] == whole and seen[-2].logit_bias[7] and all(each.ByteSize() for each in seen)


async def test_a_long_text_is_reported_each_time_it_grew_by_a_share() -> None:
    """So the number of parses does not grow with the length."""
    whole = json.dumps({"name": "x" * 20_000})
    pieces = [message(whole[at : at + 8], start=at == 0) for at in range(0, len(whole), 8)]
    last = message("", finish=pb.FINISH_REASON_EOS)
    last.deltas[0].message.CopyFrom(typed(model_pb2.Model(name="x" * 20_000)))
    async with serving(FakeServer([*pieces, last])) as fake, Client(fake.target) as client:
        names = [each.name async for each in client.stream_messages("x", model_pb2.Model)]
    assert names[-1] == "x" * 20_000
    assert 50 < len(names) < 200
    assert all(len(name) - len(before) <= len(name) / 16 + 8 for before, name in pairwise(names))


async def test_a_truncated_message_is_an_error() -> None:
    cut = script(pb.FINISH_REASON_MAX_TOKENS, whole=False)
    async with serving(FakeServer(cut)) as fake, Client(fake.target) as client:
        with pytest.raises(MessageMismatch, match=r"ended by MAX_TOKENS before its photon_grpc\.v1\.Model was whole"):
            [each async for each in client.stream_messages("x", model_pb2.Model)]
        with pytest.raises(MessageMismatch):
            await client.generate_message("x", model_pb2.Model)


def test_a_typed_message_is_unpacked_as_an_any() -> None:
    packed = typed(MODEL)
    assert unpack(packed, model_pb2.Model) == MODEL
    packed.type_url = "example.com/types/photon_grpc.v1.Model"
    assert unpack(packed, model_pb2.Model) == MODEL
    for type_url in ("photon_grpc.v1.Model/", "type.googleapis.com/v1.Model", ""):
        with pytest.raises(WrongMessageType, match=r"not a photon_grpc\.v1\.Model"):
            unpack(pb.TypedMessage(type_url=type_url, value=packed.value), model_pb2.Model)
    with pytest.raises(MessageMismatch, match=r"3 bytes are not a photon_grpc\.v1\.Model"):
        unpack(pb.TypedMessage(type_url=packed.type_url, value=b"\xff\xff\xff"), model_pb2.Model)


async def test_a_message_of_another_type_is_a_defect_of_the_server() -> None:
    last = message("", start=True, finish=pb.FINISH_REASON_EOS)
    last.deltas[0].message.CopyFrom(typed(pb.Usage(prompt_tokens=1)))
    async with serving(FakeServer([last])) as fake, Client(fake.target) as client:
        with pytest.raises(InternalFailure, match=r"is not a photon_grpc\.v1\.Model") as failed:
            await client.generate("x", message_type=model_pb2.Model)
        assert isinstance(failed.value.__cause__, WrongMessageType)


def test_messages_for_threads() -> None:
    with serving_in_a_thread(script(), script()[-1:]) as fake, SyncClient(fake.target) as client:
        assert list(client.stream_messages("x", model_pb2.Model))[-1] == MODEL
        assert client.generate_message("x", model_pb2.Model) == MODEL


def test_tools_are_described_by_their_messages() -> None:
    (tool,) = json.loads(tools_json({model_pb2.Model: "Registers a model."}))
    assert tool["type"] == "function"
    function = tool["function"]
    assert (function["name"], function["description"]) == ("Model", "Registers a model.")
    properties = function["parameters"]["properties"]
    assert properties["name"] == {"type": "string"}
    assert properties["aliases"] == {"type": "array", "items": {"type": "string"}}
    assert properties["maxContextTokens"] == {"type": "integer"}
    assert "MODEL_STATE_READY" in properties["state"]["enum"]
    assert properties["limits"]["properties"]["maxStopStrings"] == {"type": "integer"}
    (bias,) = json.loads(tools_json({pb.SamplingParams: ""}))
    assert bias["function"]["parameters"]["properties"]["logitBias"]["additionalProperties"] == {"type": "number"}


def test_well_known_types_are_described_as_their_json() -> None:
    (start,) = json.loads(tools_json({pb.GenerationStart: ""}))
    assert start["function"]["parameters"]["properties"]["createTime"] == {"type": "string", "format": "date-time"}
    with pytest.raises(InvalidRequest, match=r"google\.protobuf\.DescriptorProto is recursive"):
        tools_json({descriptor_pb2.DescriptorProto: ""})


def test_a_call_is_read_as_its_message() -> None:
    call = ToolCall(0, "Model", '{"name": "a", "maxContextTokens": 5}')
    assert read_tool_message(call, pb.Usage, model_pb2.Model) == model_pb2.Model(name="a", max_context_tokens=5)
    twice = ToolCall(0, "SamplingParams", '{"logitBias": {"5": 1, "5": 2}}')
    assert read_tool_message(twice, pb.SamplingParams) == pb.SamplingParams(logit_bias={5: 2})
    for wrong in ('["name"]', "5", "null", '{"name"', "[" * 100_000):
        with pytest.raises(MessageMismatch, match="the arguments of Model are not a message of its type"):
            read_tool_message(ToolCall(0, "Model", wrong), model_pb2.Model)
    with pytest.raises(MessageMismatch, match="the call is of 'Model', not of Usage"):
        read_tool_message(call, pb.Usage)
    with pytest.raises(MessageMismatch, match="the arguments of Model are not a message of its type"):
        read_tool_message(ToolCall(0, "Model", '{"size": 5}'), model_pb2.Model)


@pytest.mark.parametrize("with_well_known", [False, True])
def test_a_class_is_made_of_a_set_in_any_order(with_well_known: bool) -> None:
    made = find_message_type(descriptor_set(with_well_known=with_well_known), NAME)
    text = '{"number":"17","issued":"2024-05-03T00:00:00Z","price":{"cents":"4990"}}'
    invoice: Any = Parse(text, made())
    assert (invoice.issued.seconds, invoice.price.cents) == (1714694400, 4990)
    request = build_request("x", {"message_type": made}).structured_output.protobuf
    assert request.message_type == NAME
    sent = descriptor_pb2.FileDescriptorSet.FromString(request.file_descriptor_set)
    assert {file.name for file in sent.file} == {"acme/v1/invoice.proto", "acme/v1/money.proto"}


@pytest.mark.parametrize(
    ("files", "name", "problem"),
    [
        (b"\xff", NAME, "is not a serialized google.protobuf.FileDescriptorSet"),
        (b"", NAME, "has no message 'acme.v1.Invoice'"),
        (descriptor_set(), "acme.v1", "has no message 'acme.v1'"),
        (descriptor_set(with_money=False), NAME, "acme/v1/money.proto"),
    ],
)
def test_a_set_without_the_message_is_refused(files: bytes, name: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match="message_type: ") as refused:
        find_message_type(files, name)
    assert problem in str(refused.value)
