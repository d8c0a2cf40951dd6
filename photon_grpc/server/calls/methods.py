"""The methods that are served. Any other path is text from the caller, so it appears in no log and no label."""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.descriptor import FileDescriptor

from photon_grpc.admin.v1 import admin_pb2
from photon_grpc.core.counts import Labels
from photon_grpc.server.wire import descriptors
from photon_grpc.v1 import inference_pb2, model_pb2


class Method(NamedTuple):
    #: "unknown" if the method is not served.
    path: str
    #: (type, service, method).
    labels: Labels


#: The name under which AdminService is served, too, until the first release; reflection does not list it.
FORMER_ADMIN = "photon_grpc.v1.AdminService"
_FORMER_NAMES = {"photon_grpc.admin.v1.AdminService": (FORMER_ADMIN,)}

UNKNOWN = Method("unknown", ("unknown",) * 3)
MULTIPLEX = "/photon_grpc.v1.InferenceService/MultiplexGenerate"


def of(path: str) -> Method:
    return _METHODS.get(path, UNKNOWN)


def others(service: str, name: str, *, server_streaming: bool) -> Method:
    """Return a method that is served beside ours."""
    return Method(f"/{service}/{name}", (_type(False, server_streaming), service, name))


def _methods(*files: FileDescriptor) -> dict[str, Method]:
    served = (
        (service.full_name, method)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    )
    return {
        (path := f"/{name}/{method.name}"): Method(
            path, (_type(method.client_streaming, method.server_streaming), name, method.name)
        )
        for service, method in served
        for name in (service, *_FORMER_NAMES.get(service, ()))
    }


def _type(client_streaming: bool, server_streaming: bool) -> str:
    if client_streaming:
        return "bidi_stream" if server_streaming else "client_stream"
    return "server_stream" if server_streaming else "unary"


_METHODS = _methods(inference_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, *descriptors.FILES)
