"""Typed output of an `LLM`: a class in, its messages or objects out."""

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


def typed_ask(ask: Ask, structured: pb.StructuredOutput) -> Ask:
    """Add the grammar of the requested message type, if there is one. Raise InvalidConstraint."""
    if ask.constraint is not UNWRITTEN:
        return ask
    requested = structured.protobuf
    return replace(ask, constraint=_constraint(requested.file_descriptor_set, requested.message_type))


@lru_cache(maxsize=16)
def _constraint(descriptor_set: bytes, name: str) -> ConstraintAsk:
    return read_message_type(descriptor_set, name).constraint


def message_of(output: OutputDelta, message_type: Any) -> Any:
    """Return the output's message of this type; None if the output was cut off."""
    json = b"" if output.finish is None else output.finish.message_json
    return parse_message(json, message_type) if json else None


def object_of(output: OutputDelta, object_type: ObjectType) -> Any:
    """Return the object in a whole output, or a MessageMismatch if there is none."""
    return parsed(object_type, output.text, output.finish.reason.name if output.finish else "")


def given_object(answer: Any) -> Any:
    """Return the object from `object_of`. Raise its MessageMismatch if it returned one."""
    return unwrapped(answer)
