"""Typed output without the wire: a class in, its messages or objects out. The first that asks imports protobuf."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from photon_grpc.core.object_type import ObjectType
from photon_grpc.frontend.ask import ConstraintAsk
from photon_grpc.frontend.update import OutputDelta


@lru_cache(maxsize=16)
def constraint_of(message_type: type) -> ConstraintAsk:
    """Raise InvalidRequest for what is no generated class, InvalidConstraint."""
    from photon_grpc.client.message_type import write_message_type
    from photon_grpc.server.message_type import read_message_type
    from photon_grpc.v1 import inference_pb2 as pb

    described = pb.StructuredOutput.Protobuf()
    write_message_type(described, message_type)
    return read_message_type(described.file_descriptor_set, described.message_type).constraint


def message_of(output: OutputDelta, message_type: Any) -> Any:
    """The message of an output of this type; None of one that was cut."""
    from photon_grpc.client.message_type import parse_message

    json = b"" if output.finish is None else output.finish.message_json
    return parse_message(json, message_type) if json else None


def object_of(output: OutputDelta, object_type: ObjectType) -> Any:
    """The object of a whole output; a MessageMismatch where there is none."""
    from photon_grpc.client.answer_types import parsed

    return parsed(object_type, output.text, output.finish.reason.name if output.finish else "")


def given_object(answer: Any) -> Any:
    """Return the object that `object_of` made. Raise its MessageMismatch where it made none."""
    from photon_grpc.client.answer_types import given

    return given(answer)
