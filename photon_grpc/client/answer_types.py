"""The caller's classes that outputs are read as: of messages by `message_type`, of objects by `json_schema`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from photon_grpc.client.message_type import MessageMismatch, cut_off
from photon_grpc.core.object_type import ObjectType, object_type_of

#: Ends of outputs that may be only the beginning of an object.
_CUT = frozenset({"STOP_STRING", "MAX_TOKENS", "CONTEXT_LENGTH", "TIME_LIMIT", "ABORTED"})


@dataclass(frozen=True, slots=True)
class AnswerTypes:
    message_type: type[Message] | None = None
    object_type: ObjectType | None = None


def answer_types(options: Mapping[str, Any]) -> AnswerTypes:
    """Raise InvalidRequest, TypeError."""
    return AnswerTypes(options.get("message_type"), object_type_of(options))


def parsed(object_type: ObjectType, text: str, finish_reason: str) -> Any:
    """Return the object of a whole output, or the MessageMismatch that says why there is none."""
    if finish_reason in _CUT:
        return cut_off(object_type.name, text, finish_reason)
    try:
        return object_type.read(text)
    except (ValueError, TypeError, RecursionError) as error:
        told = f"the output is not a {object_type.name}: {error}"
        mismatch = MessageMismatch(told, text=text, finish_reason=finish_reason)
        mismatch.__cause__ = error
        return mismatch


def given(answer: Any) -> Any:
    """Return the object that `parsed` made. Raise its MessageMismatch where it made none."""
    if isinstance(answer, MessageMismatch):
        raise answer.with_traceback(None)
    return answer
