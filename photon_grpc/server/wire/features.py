"""The Feature that a proto field needs. No field is silently ignored."""

from __future__ import annotations

import re

from photon_grpc.errors import InvalidRequest
from photon_grpc.v1 import inference_pb2, model_pb2

Feature = model_pb2.Feature

#: The index of an entry of a list, in the path of a field.
_INDEX = re.compile(r"\[\d+\]")
#: Fields that this release supports but a model may not; the front end then refuses them.
_NEEDED: dict[str, model_pb2.Feature.ValueType] = {
    "text": Feature.FEATURE_TEXT,
    "token_ids": Feature.FEATURE_TEXT,
    "output.text": Feature.FEATURE_TEXT,
    "stop.stop_strings": Feature.FEATURE_TEXT,
    "parse_special_tokens": Feature.FEATURE_TEXT,
    "chat": Feature.FEATURE_CHAT,
    "chat.tool_choice": Feature.FEATURE_TOOL_CALLS,
    "chat.messages.parts.image": Feature.FEATURE_IMAGES,
    "chat.messages.parts.file": Feature.FEATURE_FILES,
    "chat.messages.parts.audio": Feature.FEATURE_AUDIO,
    "sampling.num_outputs": Feature.FEATURE_NUM_OUTPUTS,
    "structured_output.json_schema": Feature.FEATURE_JSON_SCHEMA,
    "structured_output.json_object": Feature.FEATURE_JSON_SCHEMA,
    "structured_output.regex": Feature.FEATURE_REGEX,
    "structured_output.choices": Feature.FEATURE_CHOICES,
    "structured_output.grammar": Feature.FEATURE_GRAMMAR,
    "structured_output.protobuf": Feature.FEATURE_PROTOBUF,
}

#: Declared in the protos but not implemented: methods, values and fields, as Service.Method, Enum.VALUE, Message.field.
#: The methods are refused and the fields are empty or 0, as docs/api.md states beside each.
ABSENT = frozenset(
    {
        "ContentPart.audio",
        "ContentPart.file",
        "ContentPart.image",
        "Feature.FEATURE_AUDIO",
        "Feature.FEATURE_FILES",
        "Feature.FEATURE_IMAGES",
    }
)


def name_of(path: str) -> str:
    """Return the Feature that the field at `path` needs, for example "FEATURE_LOGPROBS"; "" if it needs none."""
    number = _NEEDED.get(_INDEX.sub("", path))
    return "" if number is None else Feature.Name(number)


def refuse_empty(request: inference_pb2.GenerateRequest) -> None:
    """Raise InvalidRequest for a constraint or a choice that is set but empty."""
    if request.HasField("structured_output") and request.structured_output.WhichOneof("constraint") is None:
        path = "structured_output.constraint"
        raise InvalidRequest("structured_output is set but names no constraint", field=path)
    if request.chat.HasField("tool_choice") and request.chat.tool_choice.WhichOneof("choice") is None:
        raise InvalidRequest("chat.tool_choice is set but names no choice", field="chat.tool_choice.choice")
