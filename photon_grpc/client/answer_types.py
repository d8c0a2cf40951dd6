"""The caller's classes for outputs: message classes (`message_type`) and object classes (`json_schema`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from photon_grpc.client.message_type import MessageMismatch, cut_off
from photon_grpc.core.object_type import ObjectType, object_type_of

#: Finish reasons of outputs that may be incomplete objects.
_CUT = frozenset({"STOP_STRING", "MAX_TOKENS", "CONTEXT_LENGTH", "TIME_LIMIT", "ABORTED"})


@dataclass(frozen=True, slots=True)
class AnswerTypes:
    """The classes that a call's outputs are read into."""

    message_type: type[Message] | None = None
    object_type: ObjectType | None = None


def answer_types(options: Mapping[str, Any]) -> AnswerTypes:
    """Return the classes in a call's options. Raise InvalidRequest, TypeError."""
    return AnswerTypes(options.get("message_type"), object_type_of(options))


def parsed(object_type: ObjectType, text: str, finish_reason: str) -> Any:
    """Return the object in a whole output, or a MessageMismatch that states why there is none."""
    if finish_reason in _CUT:
        return cut_off(object_type.name, text, finish_reason)
    try:
        return object_type.read(text)
    except (ValueError, TypeError, RecursionError) as error:
        problem = f"the output is not a {object_type.name}: {error}"
        mismatch = MessageMismatch(problem, text=text, finish_reason=finish_reason)
        mismatch.__cause__ = error
        return mismatch


def unwrapped(result: Any) -> Any:
    """Return the object that `parsed` returned. Raise it if it is a MessageMismatch."""
    if isinstance(result, MessageMismatch):
        raise result.with_traceback(None)
    return result
