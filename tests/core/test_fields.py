"""Options are declared once; the protos and the plain code beside them say the same."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from photon_grpc.config.model_dir import GenerationDefaults
from photon_grpc.core.field import Field
from photon_grpc.core.fields import FIELDS, NEUTRAL, fields_of
from photon_grpc.core.request import SamplingParams
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.model import RequestLimits
from photon_grpc.runner.slot_table import SlotNumbers
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from photon_grpc.v1.annotations_pb2 import Range
from photon_grpc.v1.annotations_pb2 import range as range_option

PROTO = Path(__file__).parents[2] / "protos/photon_grpc/v1/inference.proto"
#: The options that the protos spell in another way.
IN_PROTO = {"message_type": "protobuf"}
CHECKED = [field for field in FIELDS.values() if field.is_checked]


def comment_of(field: Field) -> str:
    """Return the comment of an option in the proto."""
    name = IN_PROTO.get(field.name, field.name)
    found = re.search(rf"((?:  +//[^\n]*\n)+) +[^\n/]* {name} = \d+[ ;]", PROTO.read_text())
    assert found, name
    return " ".join(found[1].replace("//", " ").split())


def proto_field(field: Field) -> FieldDescriptor:
    whole = pb.GenerateRequest.DESCRIPTOR
    message = whole.fields_by_name[field.group].message_type if field.group else whole
    assert message is not None
    return message.fields_by_name[IN_PROTO.get(field.name, field.name)]


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.name)
def test_a_proto_field_can_be_unset_where_the_declaration_has_no_default(field: Field) -> None:
    in_proto = proto_field(field)
    if field.group not in ("", "structured_output", "chat"):
        is_unset_something = field.default is None or bool(field.default) or field.unit != ""
        assert in_proto.has_presence == is_unset_something


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_protos_name_the_neutral_values_and_the_bounds(name: str) -> None:
    field, comment = FIELDS[name], comment_of(FIELDS[name])
    assert f"Neutral: {field.neutral:g}" in comment
    assert getattr(SamplingParams(), name) == field.neutral
    bounds = field.bounds
    assert bounds is not None
    if bounds.off is not None:
        assert f"{bounds.off} is off, else at least {bounds.least}" in comment
    elif bounds.most == math.inf:
        assert f"At least {bounds.least:g}." in comment
    else:
        interval = f"in {'(' if bounds.is_open else '['}{bounds.least}, {bounds.most}]"
        assert interval in comment.lower()


@pytest.mark.parametrize("field", CHECKED, ids=lambda field: field.name)
def test_values_within_the_sure_range_pass_the_check(field: Field) -> None:
    limits = RequestLimits()
    numbers = (-101, -2.5, -2, -1, -1e-9, 0, 1e-9, 5e-4, 0.5, 1, 2, 20, 64, 999, 2e4, 2**31, 2**64, math.inf, math.nan)
    values = numbers if field.bounds else ("", "x" * field.max_chars, "x" * (field.max_chars + 1))
    least, most = field.sure_range(limits)
    for value in values:
        try:
            field.check(value, limits)
        except InvalidRequest as error:
            assert not (least <= value <= most) and error.field == field.path
            assert str(value) in str(error) or str(field.max_chars) in str(error)


@pytest.mark.parametrize(
    ("name", "value", "needed", "limit"),
    [
        ("num_outputs", 0, 0, 1),
        ("num_outputs", 65, 65, 64),
        ("speculation", 8, 8, 7),
        ("temperature", -1.0, -1.0, 0.0),
        ("top_p", struct.unpack("f", struct.pack("f", 1.1))[0], 1.1, 1),
        ("top_p", 1.100000001, 1.100000001, 1),
        ("top_k", 0, 0, 1),
        ("repetition_penalty", 0.0, 0.0, 0.001),
        ("temperature", math.inf, None, None),
    ],
)
def test_an_error_has_the_value_and_the_bound_that_it_breaks(
    name: str, value: float, needed: float | None, limit: float | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        FIELDS[name].check(value, RequestLimits())
    assert (caught.value.needed, caught.value.limit) == (needed, limit)
    assert needed is None or str(caught.value).endswith(f" is {needed}")


def declared_range(field: Field) -> Range:
    """Return the annotation that the declaration of an option demands. It leaves out what the type rules out anyway."""
    kind, bounds = proto_field(field), field.bounds
    most_of_type = {FieldDescriptor.CPPTYPE_INT32: 2**31 - 1, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}
    least_of_type = {
        **dict.fromkeys((FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64), 0),
        FieldDescriptor.CPPTYPE_INT32: -(2**31),
    }
    found = Range()
    if bounds is not None:
        is_named = isinstance(bounds.most, str)
        has_most = not is_named and bounds.most < most_of_type.get(kind.cpp_type, math.inf)
        if is_named or has_most or bounds.least != least_of_type.get(kind.cpp_type):
            found.minimum, found.exclusive_minimum = bounds.least, bounds.is_open
        if is_named:
            found.maximum_limit = bounds.most
        elif has_most:
            found.maximum = bounds.most
        if bounds.off is not None:
            found.off = bounds.off
    if field.max_items.startswith("limits."):
        found.maximum_limit = field.max_items.removeprefix("limits.")
    if field.max_chars:
        found.maximum_characters = field.max_chars
    return found


def annotated_ranges(message: Descriptor, seen: set[str]) -> dict[str, Range]:
    """Return the annotations in a message and in all below it, by the full name of the field."""
    if message.full_name in seen:
        return {}
    seen.add(message.full_name)
    found = {}
    for field in message.fields:
        if field.GetOptions().HasExtension(range_option):
            found[field.full_name] = field.GetOptions().Extensions[range_option]
        if field.message_type is not None:
            found |= annotated_ranges(field.message_type, seen)
    return found


def test_the_ranges_in_the_protos_are_those_of_the_declarations() -> None:
    """Neither has a bound that the other lacks."""
    declared = {proto_field(field).full_name: declared_range(field) for field in FIELDS.values()}
    requests = [
        method.input_type
        for module in (pb, model_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    seen: set[str] = set()
    annotated = {name: found for request in requests for name, found in annotated_ranges(request, seen).items()}
    assert annotated == {name: found for name, found in declared.items() if found != Range()}
    limits = {found.maximum_limit for found in annotated.values()} - {""}
    assert limits <= {field.name for field in model_pb2.Limits.DESCRIPTOR.fields}


def test_every_number_of_a_draw_has_a_column_in_the_slot_table() -> None:
    numbers = {field.name for field in fields_of("sampling") if field.kind in (int, float)} - {"num_outputs"}
    assert numbers <= set(SlotNumbers._fields)
    assert set(SamplingParams.__struct_fields__) == {field.name for field in fields_of("sampling")} - {"num_outputs"}


def test_the_defaults_of_a_model_are_parameters_of_a_request() -> None:
    others = {"do_sample", "bos_token_id", "eos_token_id"}
    assert GenerationDefaults.__annotations__.keys() - others <= NEUTRAL.keys()
