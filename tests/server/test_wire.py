"""The count of fields on the wire, compared with protobuf's own reading of the same bytes."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import example, given, settings
from hypothesis import strategies as st

from photon_grpc.errors import InvalidRequest, MalformedMessage
from photon_grpc.server.wire.fields import count_fields
from photon_grpc.v1 import inference_pb2 as pb
from tests.examples import examples

DESCRIPTOR = pb.GenerateRequest.DESCRIPTOR
_LENGTH, _GROUP = 2, 3


def count_by_protobuf(message: bytes, descriptor: Descriptor | None) -> int:
    """Count the fields by parsing as Empty, which keeps every field as unknown."""
    return count_of(UnknownFieldSet(Empty.FromString(message)), descriptor)


def count_of(fields: UnknownFieldSet, descriptor: Descriptor | None) -> int:
    count = 0
    for field in fields:
        count += 1
        known = descriptor.fields_by_number.get(field.field_number) if descriptor else None
        if field.wire_type == _LENGTH and known is not None and known.message_type is not None:
            count += count_by_protobuf(field.data, known.message_type)
        elif field.wire_type == _GROUP:
            count += count_of(field.data, None)
    return count


MESSAGES = st.builds(
    pb.GenerateRequest,
    text=st.text(max_size=200),
    request_id=st.text(max_size=5),
    sampling=st.builds(
        pb.SamplingParams,
        temperature=st.floats(width=32),
        seed=st.integers(0, 2**64 - 1),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(width=32), max_size=3),
    ),
    stop=st.builds(
        pb.StopParams,
        stop_strings=st.lists(st.text(max_size=4), max_size=3),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4),
    ),
) | st.builds(
    pb.GenerateRequest,
    chat=st.builds(
        pb.ChatInput,
        messages=st.lists(
            st.builds(pb.ChatMessage, role=st.text(max_size=4), content=st.text(max_size=150)), max_size=5
        ),
    ),
)
PIECES = st.lists(st.binary(max_size=4) | st.sampled_from([b"\x0b\x0c", b"\x80\x00", b"\x8b\x80\x00"]), max_size=4)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = draw(MESSAGES).SerializeToString()
    for piece in draw(PIECES):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + piece + data[at + draw(st.integers(0, 3)) :]
    return data


@settings(max_examples=examples(200), deadline=None)
@given(MESSAGES.map(lambda message: message.SerializeToString()) | mutated() | st.binary(max_size=40))
@example(b"\x0b" * 99 + b"\x0c" * 99)
@example(b"\x0b" * 100 + b"\x0c" * 100)
@example(b"\x0b" * 500 + b"\x0c" * 500)
@example(b"\x88\x80\x80\x80\x00\x01")
@example(b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00")
def test_what_protobuf_accepts_is_counted_and_the_rest_is_refused(data: bytes) -> None:
    try:
        pb.GenerateRequest.FromString(data)
        expected = count_by_protobuf(data, DESCRIPTOR)
    except DecodeError:
        with contextlib.suppress(MalformedMessage):  # the parser finds text that is not UTF-8
            count_fields(data, DESCRIPTOR)
        return
    assert count_fields(data, DESCRIPTOR) == expected


def test_more_fields_than_allowed_are_refused_at_the_field_with_both_numbers() -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="x")] * 10)
    data = pb.GenerateRequest(chat=chat).SerializeToString()
    assert count_fields(data, DESCRIPTOR, 31) == 31
    with pytest.raises(InvalidRequest) as caught:
        count_fields(data, DESCRIPTOR, 30)
    assert caught.value.field.startswith("chat.messages.")
    assert (caught.value.needed, caught.value.limit) == (31, 30)
    with pytest.raises(InvalidRequest, match=r"chat\.messages "):
        count_fields(data, DESCRIPTOR, 28)
    with pytest.raises(InvalidRequest) as caught:
        count_fields(b"\xf8\x3f\x01" * 5, DESCRIPTOR, 4)  # unknown fields count, and have no name
    assert caught.value.field == "1023"


def test_a_list_of_numbers_is_bounded_before_it_takes_four_times_its_bytes() -> None:
    data = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (2**22 + 1))).SerializeToString()
    with pytest.raises(InvalidRequest) as caught:
        count_fields(data, DESCRIPTOR)
    assert (caught.value.field, caught.value.needed, caught.value.limit) == ("token_ids.ids", 2**22 + 1, 2**22)


def test_long_lists_and_texts_are_one_field() -> None:
    data = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 300_000)).SerializeToString()
    assert count_fields(data, DESCRIPTOR) == 2
    assert count_fields(pb.GenerateRequest(text="\n" * 300_000).SerializeToString(), DESCRIPTOR) == 1
