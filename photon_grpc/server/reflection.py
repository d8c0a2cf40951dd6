"""Server reflection under both of its names: `v1alpha` for old clients, the same messages as `v1` for those that dropped it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from photon_grpc.server import health
from photon_grpc.v1 import inference_pb2, model_pb2

_V1ALPHA = reflection.SERVICE_NAME
_V1 = "grpc.reflection.v1.ServerReflection"


def handlers(services: Sequence[str]) -> tuple[grpc.GenericRpcHandler, ...]:
    """Handlers of both versions, which tell of `services` (full names) and of v1alpha itself.

    v1's own name is left out: the package has no descriptor of it, and `grpcurl describe` fails on a listed name without one.
    """
    servicer = reflection.aio.ReflectionServicer((*services, _V1ALPHA), pool=_pool())
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    return tuple(grpc.method_handlers_generic_handler(name, methods) for name in (_V1, _V1ALPHA))


def _pool() -> descriptor_pool.DescriptorPool:
    """What is served, with the health service as it is served here, and what a status's details hold: clients print them by name."""
    pool = descriptor_pool.DescriptorPool()
    seen: set[str] = set()
    files = (inference_pb2, model_pb2, reflection_pb2, error_details_pb2)
    for file in (module.DESCRIPTOR for module in files):
        _add(pool, file, seen)
    pool.AddSerializedFile(health.file_proto().SerializeToString())
    return pool


def _add(pool: descriptor_pool.DescriptorPool, file: Any, seen: set[str]) -> None:
    if file.name in seen:
        return
    seen.add(file.name)
    for dependency in file.dependencies:
        _add(pool, dependency, seen)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    pool.AddSerializedFile(proto.SerializeToString())
