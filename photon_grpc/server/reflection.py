"""Server reflection under both of its names: `v1alpha` for old clients, the same messages as `v1` for those that
dropped it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from photon_grpc.server import health

_V1ALPHA = reflection.SERVICE_NAME
_V1 = "grpc.reflection.v1.ServerReflection"
SERVICES = (_V1, _V1ALPHA)


def handlers(services: Sequence[str], modules: Sequence[Any]) -> tuple[grpc.GenericRpcHandler, ...]:
    """Handlers of both versions, which tell of `services` (full names, defined in `modules`) and of v1alpha itself.

    v1's own name is left out: the package has no descriptor of it, and `grpcurl describe` fails on a listed name
    without one.
    """
    servicer = _Servicer((*services, _V1ALPHA), _files(modules))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    return tuple(grpc.method_handlers_generic_handler(name, methods) for name in SERVICES)


class _Servicer(reflection.aio.ReflectionServicer):
    """The package's, which finds no method by name: Python's descriptor pool does not. `grpcurl describe` of a method
    and ghz ask for one."""

    def __init__(self, services: Sequence[str], files: Sequence[FileDescriptorProto]) -> None:
        pool = descriptor_pool.DescriptorPool()
        for file in files:
            pool.AddSerializedFile(file.SerializeToString())
        super().__init__(services, pool=pool)
        self._file_of = {symbol: file.name for file in files for symbol in _symbols_of(file)}

    def _file_containing_symbol(self, request: Any, fully_qualified_name: str) -> Any:
        return self._file_by_filename(request, self._file_of.get(fully_qualified_name, ""))  # type: ignore[attr-defined]


def _symbols_of(file: FileDescriptorProto) -> Iterator[str]:
    """Full names of all that `file` defines. The values of an enum stand beside it; grpcurl writes them as if within,
    so both are known."""
    for message in file.message_type:
        yield from _symbols_of_message(file.package, message)
    for service in file.service:
        yield f"{file.package}.{service.name}"
        yield from (f"{file.package}.{service.name}.{method.name}" for method in service.method)
    yield from _symbols_of_enums(file.package, file.enum_type)
    yield from (f"{file.package}.{extension.name}" for extension in file.extension)


def _symbols_of_message(scope: str, message: DescriptorProto) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    yield name
    yield from (f"{name}.{field.name}" for field in (*message.field, *message.extension))
    yield from (f"{name}.{oneof.name}" for oneof in message.oneof_decl)
    yield from _symbols_of_enums(name, message.enum_type)
    for nested in message.nested_type:
        yield from _symbols_of_message(name, nested)


def _symbols_of_enums(scope: str, enums: Iterable[EnumDescriptorProto]) -> Iterator[str]:
    for enum in enums:
        yield f"{scope}.{enum.name}"
        for value in enum.value:
            yield from (f"{scope}.{value.name}", f"{scope}.{enum.name}.{value.name}")


def _files(modules: Sequence[Any]) -> list[FileDescriptorProto]:
    """Files of `modules`, of the services served everywhere, health included, and of a status's details, which clients
    print by name. A file stands behind those that it imports."""
    files: dict[str, FileDescriptorProto] = {}
    for module in (*modules, reflection_pb2, error_details_pb2):
        _add(files, module.DESCRIPTOR)
    return [*files.values(), health.file_proto()]


def _add(files: dict[str, FileDescriptorProto], file: Any) -> None:
    if file.name not in files:
        for dependency in file.dependencies:
            _add(files, dependency)
        files[file.name] = FileDescriptorProto()
        file.CopyToProto(files[file.name])
