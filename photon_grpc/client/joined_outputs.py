"""The one place where deltas of a stream are joined, by the option `delta` of Output's fields.

A field of a newer server, which this client's descriptors do not have, is kept as protobuf keeps unknown fields.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.descriptor import FieldDescriptor

from photon_grpc.v1 import annotations_pb2
from photon_grpc.v1 import inference_pb2 as pb


def _fields(delta: annotations_pb2.Delta.ValueType) -> Iterable[FieldDescriptor]:
    """Return the fields of Output that have this option."""
    fields = pb.Output.DESCRIPTOR.fields
    return (field for field in fields if field.GetOptions().Extensions[annotations_pb2.delta] == delta)


#: The field by which the parts of one output are known.
(_KEY,) = (field.name for field in _fields(annotations_pb2.DELTA_KEY))
#: Merging appends lists and sets what is set once, but it would replace a text by its last part.
_TEXTS = tuple(field.name for field in _fields(annotations_pb2.DELTA_APPEND) if not field.is_repeated)


def joined_outputs(deltas: Iterable[pb.Output]) -> list[pb.Output]:
    """Return the whole outputs in order of index."""
    parts: dict[int, list[pb.Output]] = {}
    for delta in deltas:
        parts.setdefault(getattr(delta, _KEY), []).append(delta)
    return [_joined(parts[index]) for index in sorted(parts)]


def _joined(parts: list[pb.Output]) -> pb.Output:
    whole = pb.Output()
    for part in parts:
        whole.MergeFrom(part)
    for name in _TEXTS:
        setattr(whole, name, "".join([getattr(part, name) for part in parts]))
    return whole
