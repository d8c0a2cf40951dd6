"""A message type as a compiler describes it, for clients without a generated class."""

from __future__ import annotations

from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

NAME = "acme.v1.Invoice"


def descriptor_set(*, with_money: bool = True, with_well_known: bool = False) -> bytes:
    """Return a serialized FileDescriptorSet in which a file precedes those that it imports."""
    imports = ["google/protobuf/timestamp.proto", "acme/v1/money.proto"]
    invoice = FileDescriptorProto(name="acme/v1/invoice.proto", package="acme.v1", syntax="proto3", dependency=imports)
    fields = invoice.message_type.add(name="Invoice").field
    fields.add(name="number", number=1, type=FieldDescriptorProto.TYPE_STRING, json_name="number")
    for number, (name, kind) in enumerate((("issued", ".google.protobuf.Timestamp"), ("price", ".acme.v1.Money")), 2):
        fields.add(name=name, number=number, type=FieldDescriptorProto.TYPE_MESSAGE, type_name=kind, json_name=name)
    money = FileDescriptorProto(name="acme/v1/money.proto", package="acme.v1", syntax="proto3")
    money.message_type.add(name="Money").field.add(
        name="cents", number=1, type=FieldDescriptorProto.TYPE_INT64, json_name="cents"
    )
    described = FileDescriptorSet(file=[invoice, *([money] if with_money else [])])
    if with_well_known:
        timestamp_pb2.DESCRIPTOR.CopyToProto(described.file.add())
    for file in described.file:
        for message in file.message_type:
            for field in message.field:
                field.label = FieldDescriptorProto.LABEL_OPTIONAL
    return described.SerializeToString()
