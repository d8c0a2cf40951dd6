"""The Feature that a proto field needs, and the fields that this build refuses. No field is ignored."""

from __future__ import annotations

from google.protobuf.message import Message

from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.v1 import inference_pb2, model_pb2

Feature = model_pb2.Feature

#: Fields of GenerateRequest that this build does not act on yet.
UNSUPPORTED: dict[str, model_pb2.Feature.ValueType] = {
    "structured_output.protobuf": Feature.FEATURE_PROTOBUF,
}

#: Fields that a model may lack although the build has them; the front end refuses these.
_BY_MODEL: dict[str, model_pb2.Feature.ValueType] = {
    "text": Feature.FEATURE_TEXT,
    "token_ids": Feature.FEATURE_TEXT,
    "output.text": Feature.FEATURE_TEXT,
    "stop.stop_strings": Feature.FEATURE_TEXT,
    "parse_special_tokens": Feature.FEATURE_TEXT,
    "chat": Feature.FEATURE_CHAT,
    "sampling.num_outputs": Feature.FEATURE_NUM_OUTPUTS,
    "structured_output.json_schema": Feature.FEATURE_JSON_SCHEMA,
    "structured_output.json_object": Feature.FEATURE_JSON_SCHEMA,
    "structured_output.regex": Feature.FEATURE_REGEX,
    "structured_output.choices": Feature.FEATURE_CHOICES,
    "structured_output.grammar": Feature.FEATURE_GRAMMAR,
}


def name_of(path: str) -> str:
    """The Feature that the field at `path` needs, for example "FEATURE_LOGPROBS"; empty where it needs none."""
    number = UNSUPPORTED.get(path, _BY_MODEL.get(path))
    return "" if number is None else Feature.Name(number)


def refuse_unsupported(request: inference_pb2.GenerateRequest) -> None:
    """Raise FeatureNotSupported for the first field that asks for what this build lacks, InvalidRequest for an empty
    constraint."""
    for path in UNSUPPORTED:
        if _is_asked(request, path):
            raise FeatureNotSupported(f"{path} is not supported yet ({name_of(path)})", field=path)
    if request.HasField("structured_output") and request.structured_output.WhichOneof("constraint") is None:
        path = "structured_output.constraint"
        raise InvalidRequest("structured_output is set but names no constraint", field=path)


def _is_asked(message: Message, path: str) -> bool:
    parent, _, leaf = path.rpartition(".")
    if parent:
        if not message.HasField(parent):
            return False
        message = getattr(message, parent)
    return message.HasField(leaf)
