"""The methods that are served. Any other path is a text of its caller's: it stands in no log and no label."""

from __future__ import annotations

from google.protobuf.descriptor import FileDescriptor

from photon_grpc.core.counts import Labels
from photon_grpc.server import health, orca, reflection
from photon_grpc.v1 import admin_pb2, inference_pb2, model_pb2

UNKNOWN = "unknown"


def labels(path: str) -> Labels:
    """(type, service, method)."""
    return _LABELS.get(path, (UNKNOWN,) * 3)


def name(path: str) -> str:
    """The path itself where it is served."""
    return path if path in _LABELS else UNKNOWN


def _labels(*files: FileDescriptor) -> dict[str, Labels]:
    return {
        f"/{service.full_name}/{method.name}": (
            _type(method.client_streaming, method.server_streaming),
            service.full_name,
            method.name,
        )
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


def _type(client_streaming: bool, server_streaming: bool) -> str:
    if client_streaming:
        return "bidi_stream" if server_streaming else "client_stream"
    return "server_stream" if server_streaming else "unary"


_OURS = inference_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR
_LABELS = _labels(*_OURS, health.DESCRIPTOR, orca.DESCRIPTOR) | {
    f"/{service}/ServerReflectionInfo": ("bidi_stream", service, "ServerReflectionInfo")
    for service in reflection.SERVICES
}
