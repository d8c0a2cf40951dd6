"""Deltas are joined as the option `delta` of Output's fields says, which these tests read from the descriptors."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.client.joined_outputs import joined_outputs
from photon_grpc.v1 import annotations_pb2
from photon_grpc.v1 import inference_pb2 as pb

FIELDS = pb.Output.DESCRIPTOR.fields
KINDS: dict[str, str] = {
    field.name: annotations_pb2.Delta.Name(field.GetOptions().Extensions[annotations_pb2.delta]) for field in FIELDS
}


def test_every_field_says_how_it_joins() -> None:
    assert set(KINDS.values()) == {"DELTA_KEY", "DELTA_APPEND", "DELTA_ONCE"}
    assert [name for name, kind in KINDS.items() if kind == "DELTA_KEY"] == ["index"]
    for field in FIELDS:
        can_append = field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        assert KINDS[field.name] != "DELTA_APPEND" or can_append, f"{field.name} has nothing to append to"


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.text(max_size=20),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32, allow_nan=False),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 8),
}


def fill(draw: st.DrawFn, message: Any) -> None:
    """Draw values of all fields, as Generate might return them: absent, empty or full."""
    for field in message.DESCRIPTOR.fields:
        is_alternative = field.containing_oneof is not None and message.WhichOneof(field.containing_oneof.name)
        if is_alternative or not draw(st.booleans()):
            continue
        if field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                if field.message_type:
                    fill(draw, getattr(message, field.name).add())
                else:
                    getattr(message, field.name).append(draw(SCALARS[field.type]))
        elif field.message_type:
            getattr(message, field.name).SetInParent()
            fill(draw, getattr(message, field.name))
        else:
            setattr(message, field.name, draw(SCALARS[field.type]))


def cut(draw: st.DrawFn, whole: pb.Output) -> list[pb.Output]:
    """Cut an output into parts, at places that no field shares with another."""
    parts = [pb.Output() for _ in range(draw(st.integers(1, 4)))]
    for field in FIELDS:
        value, kind = getattr(whole, field.name), KINDS[field.name]
        if kind == "DELTA_APPEND":
            places = sorted(draw(st.integers(0, len(value))) for _ in parts[1:])
            for part, begin, end in zip(parts, [0, *places], [*places, len(value)], strict=True):
                if field.is_repeated:
                    getattr(part, field.name).extend(value[begin:end])
                else:
                    setattr(part, field.name, value[begin:end])
        elif kind == "DELTA_KEY":
            for part in parts:
                setattr(part, field.name, value)
        elif whole.HasField(field.name):
            getattr(draw(st.sampled_from(parts)), field.name).CopyFrom(value)
    return parts


@given(st.data())
def test_joined_parts_are_the_whole_however_they_were_cut(data: st.DataObject) -> None:
    @st.composite
    def drawn(draw: st.DrawFn) -> tuple[list[pb.Output], list[pb.Output]]:
        wholes, parts = [], []
        for index in draw(st.lists(st.integers(0, 2**32 - 1), unique=True, max_size=3).map(sorted)):
            whole = pb.Output()
            fill(draw, whole)
            whole.index = index
            wholes.append(whole)
            parts.append(cut(draw, whole))
        # The parts of one output stay in order; those of several are mixed.
        order = draw(st.permutations([at for at, cuts in enumerate(parts) for _ in cuts]))
        return wholes, [parts[at].pop(0) for at in order]

    wholes, deltas = data.draw(drawn())
    assert joined_outputs(deltas) == wholes


def test_the_fields_of_a_newer_server_are_kept() -> None:
    number, wire = 900, 2
    unknown = bytes([(number << 3 | wire) & 0x7F | 0x80, (number << 3 | wire) >> 7, 1])
    deltas = [pb.Output(text=text) for text in "ab"]
    for delta, value in zip(deltas, (b"x", b"y"), strict=True):
        delta.MergeFromString(unknown + value)
    (whole,) = joined_outputs(deltas)
    assert whole.text == "ab"
    assert whole.SerializeToString().count(unknown) == 2
