"""Descriptors of message types from a short notation: fields as "name: type"."""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

F = FieldDescriptorProto
WELL_KNOWN = ("any", "duration", "empty", "field_mask", "struct", "timestamp", "wrappers")
SCALARS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64"),
    *("sfixed32", "sfixed64", "bool", "string", "bytes"),
)


def file(name: str = "acme.proto", *, syntax: str = "proto3", imports: tuple[str, ...] = ()) -> FileDescriptorProto:
    """Return an empty file of the package acme, which imports the well-known files."""
    well_known = [f"google/protobuf/{each}.proto" for each in WELL_KNOWN]
    described = FileDescriptorProto(name=name, package="acme", dependency=[*well_known, *imports])
    if syntax == "proto3":
        described.syntax = syntax
    return described


def message(file: FileDescriptorProto, name: str, *fields: str) -> DescriptorProto:
    """Add a message with fields such as "id: int64", "tags: repeated string" or "by: map string .acme.Money".

    Further labels are "note: optional string", "a: oneof pick string" and "must: required int32".
    """
    described = file.message_type.add(name=name)
    for text in fields:
        add_field(described, text)
    # After those of real oneofs, as protobuf requires.
    for field in described.field:
        if field.proto3_optional:
            field.oneof_index = len(described.oneof_decl)
            described.oneof_decl.add(name=f"_{field.name}")
    return described


def add_field(described: DescriptorProto, text: str) -> FieldDescriptorProto:
    name, _, rest = text.partition(": ")
    words = rest.split()
    field = described.field.add(name=name, number=len(described.field) + 1, label=F.LABEL_OPTIONAL)
    if words[0] == "map":
        entry = described.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        set_type(entry.field.add(name="key", number=1, label=F.LABEL_OPTIONAL), words[1])
        set_type(entry.field.add(name="value", number=2, label=F.LABEL_OPTIONAL), words[2])
        field.label = F.LABEL_REPEATED
        field.type, field.type_name = F.TYPE_MESSAGE, entry.name
        return field
    if words[0] in ("repeated", "required"):
        field.label = F.Label.Value(f"LABEL_{words[0].upper()}")
    elif words[0] == "optional":
        field.proto3_optional = True
    elif words[0] == "oneof":
        names = [group.name for group in described.oneof_decl]
        if words[1] not in names:
            described.oneof_decl.add(name=words[1])
            names.append(words[1])
        field.oneof_index = names.index(words[1])
    set_type(field, words[-1])
    return field


def set_type(field: FieldDescriptorProto, name: str) -> None:
    if name in SCALARS:
        field.type = F.Type.Value(f"TYPE_{name.upper()}")
    else:
        field.type_name = name
        field.type = F.TYPE_ENUM if name.endswith(("Color", "NullValue")) else F.TYPE_MESSAGE


def enum(file: FileDescriptorProto, name: str, *values: str) -> EnumDescriptorProto:
    """Add an enum, whose name must end with "Color" so that fields recognize it."""
    described = file.enum_type.add(name=name)
    for number, value in enumerate(values):
        described.value.add(name=value, number=number)
    return described


def serialized(*files: FileDescriptorProto) -> bytes:
    return FileDescriptorSet(file=files).SerializeToString()
