"""Typed output without the wire: a class in, its messages or objects out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from photon_grpc.client.answer_types import parsed, unwrapped
from photon_grpc.client.message_type import parse_message
from photon_grpc.core.ask import UNWRITTEN, Ask, ConstraintAsk
from photon_grpc.core.object_type import ObjectType
from photon_grpc.frontend.output.update import OutputDelta
from photon_grpc.server.typed.message_type import read_message_type
from photon_grpc.v1 import inference_pb2 as pb


def typed_ask(ask: Ask, wanted: pb.StructuredOutput) -> Ask:
    """Add the grammar of the message type that is wanted, if one is. Raise InvalidConstraint."""
    if ask.constraint is not UNWRITTEN:
        return ask
    described = wanted.protobuf
    return replace(ask, constraint=_constraint(described.file_descriptor_set, described.message_type))


@lru_cache(maxsize=16)
def _constraint(descriptor_set: bytes, name: str) -> ConstraintAsk:
    return read_message_type(descriptor_set, name).constraint


def message_of(output: OutputDelta, message_type: Any) -> Any:
    """Return the message of an output of this type; None of one that was cut."""
    json = b"" if output.finish is None else output.finish.message_json
    return parse_message(json, message_type) if json else None


def object_of(output: OutputDelta, object_type: ObjectType) -> Any:
    """Return the object of a whole output; a MessageMismatch where there is none."""
    return parsed(object_type, output.text, output.finish.reason.name if output.finish else "")


def given_object(answer: Any) -> Any:
    """Return the object that `object_of` returned. Raise it if it is a MessageMismatch."""
    return unwrapped(answer)
