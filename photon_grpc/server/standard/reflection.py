"""Server reflection under both of its names. Descriptors are as protoc writes them, with JSON names of fields."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._base import BaseReflectionServicer

from photon_grpc.access.places import Places
from photon_grpc.server.calls.call import current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.calls.receiver import Messages
from photon_grpc.server.wire import descriptors

#: Files that no service imports, but readers of errors need.
_OF_ERRORS = ("google/rpc/error_details.proto", "photon_grpc/v1/errors.proto")
#: Open streams of both versions; each may hold an arriving message.
MAX_STREAMS = 64


def places() -> Places:
    return Places("reflection streams", MAX_STREAMS, oldest_first=False)


def handlers(
    services: Sequence[str], streams: Places, others: Sequence[str] = (), files: Sequence[FileDescriptorProto] = ()
) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return the handlers of both versions, which describe `services` (full names) and themselves.

    `others` are services of `files`, which are not among ours. Each file follows those that it imports.
    """
    described = [_Files(files), _Files(_files(services))]
    servicer = _Servicer((*services, *others, *descriptors.REFLECTION), described, streams)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    return tuple(grpc.method_handlers_generic_handler(name, methods) for name in descriptors.REFLECTION)


class _Files(BaseReflectionServicer):
    """The answers of files in a pool of their own. Methods are found by name, too: grpcurl's describe and ghz ask."""

    def __init__(self, files: Sequence[FileDescriptorProto]) -> None:
        pool = descriptor_pool.DescriptorPool()
        for file in files:
            pool.AddSerializedFile(file.SerializeToString())
        super().__init__((), pool=pool)
        self._file_of = {symbol: file.name for file in files for symbol in _symbols_of(file)}

    def _file_containing_symbol(self, request: Any, fully_qualified_name: str) -> Any:
        name = self._file_of.get(fully_qualified_name, "")
        return self._file_by_filename(request, name)  # type: ignore[attr-defined]  # its stubs lack it

    def answer(self, question: str, request: Any, *wanted: Any) -> Any:
        """Return the answer of the method that is called `question`."""
        return getattr(self, question)(request, *wanted)


class _Servicer(reflection.aio.ReflectionServicer):
    """The package's servicer over several sets of files, which may have files and symbols of the same name.

    An answer is of the first set that has one, with all that the file imports. So clients see a service as its owner
    described it.
    """

    def __init__(self, services: Sequence[str], described: Sequence[_Files], streams: Places) -> None:
        super().__init__(services)
        self._described = described
        self._streams = streams

    async def ServerReflectionInfo(  # type: ignore[override]  # its stubs say otherwise than it does
        self, request_iterator: Messages, unused_context: Context
    ) -> AsyncIterator[Any]:
        """Answer each message. Raise QueueFull; `request_iterator` ends the call if others need its place."""
        with self._streams.take(current().caller, request_iterator):
            async for answer in super().ServerReflectionInfo(request_iterator, unused_context):  # type: ignore[attr-defined]
                yield answer

    def _first(self, question: str, request: Any, *wanted: Any) -> Any:
        answer = None
        for files in self._described:
            answer = files.answer(question, request, *wanted)
            if not answer.HasField("error_response"):
                break
        return answer

    def _file_by_filename(self, request: Any, filename: str) -> Any:
        return self._first("_file_by_filename", request, filename)

    def _file_containing_symbol(self, request: Any, fully_qualified_name: str) -> Any:
        return self._first("_file_containing_symbol", request, fully_qualified_name)

    def _file_containing_extension(self, request: Any, containing_type: str, extension_number: int) -> Any:
        return self._first("_file_containing_extension", request, containing_type, extension_number)

    def _all_extension_numbers_of_type(self, request: Any, containing_type: str) -> Any:
        return self._first("_all_extension_numbers_of_type", request, containing_type)


def _symbols_of(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the full names of all that `file` defines.

    The values of an enum are in the scope of the enum itself, but grpcurl puts them inside the enum, so both are known.
    """
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


def _files(services: Sequence[str]) -> list[FileDescriptorProto]:
    """Return the files of `services`, health, reflection and errors, each after those that it imports."""
    served = {descriptors.HEALTH, *descriptors.REFLECTION, *services}
    names = {*_OF_ERRORS}
    found = []
    for file in reversed(descriptors.ALL):
        if file.name in names or any(f"{file.package}.{service.name}" in served for service in file.service):
            names.update(file.dependency)
            found.append(file)
    return found[::-1]
