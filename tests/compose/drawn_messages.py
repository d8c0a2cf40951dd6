"""Random message types of everything that JSON has a form for."""

from __future__ import annotations

from random import Random

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tests.server.described import SCALARS, enum, file, message, serialized

KEYS = ("string", "bool", "int32", "int64", "uint32", "uint64", "sint32", "fixed64", "sfixed32")
WELL_KNOWN = tuple(
    f".google.protobuf.{name}"
    for name in (
        *("Timestamp", "Duration", "FieldMask", "Struct", "Value", "ListValue", "Empty", "NullValue"),
        *("DoubleValue", "FloatValue", "Int64Value", "UInt64Value", "Int32Value", "UInt32Value"),
        *("BoolValue", "StringValue", "BytesValue"),
    )
)


def draw(random: Random) -> tuple[bytes, str]:
    """Return a random serialized set and the name of a message in it."""
    described = file(syntax=random.choice(("proto2", "proto3")))
    enum(described, "Color", "COLOR_NONE", "RED", "DARK_BLUE")
    names = ["A", "B", "C"][: random.randrange(1, 4)]
    for name in names:
        _draw_message(random, described, name, names)
    return serialized(described), "acme.A"


def _draw_message(random: Random, described: FileDescriptorProto, name: str, names: list[str]) -> None:
    types = [*SCALARS, *WELL_KNOWN, *[f".acme.{each}" for each in (*names, *names, *names, "Color")]]
    is_old, fields = described.syntax != "proto3", list[str]()
    for number in range(random.randrange(1, 7)):
        kind = random.choice(types)
        is_later = kind.startswith(".acme.") and kind != ".acme.Color" and kind[-1] > name
        form = random.choice(("", "", "repeated ", "map", "oneof pick ", "oneof other ", "optional"))
        if is_old and form == "" and (is_later or not kind.startswith(".acme.")):
            form = "required "
        if form == "map":
            form = f"map {random.choice(KEYS)} "
        if form == "optional":
            form = "" if is_old else "optional "
        fields.append(f"field_{number}: {form}{kind}")
    message(described, name, *fields)
