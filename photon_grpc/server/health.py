"""grpc.health.v1.Health: Check, Watch, List. "" is liveness, the inference service's name is readiness.

The messages are built in a pool of their own, because grpcio-health-checking lacks those of List and a process may hold
one definition of a proto file per pool only.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2

from photon_grpc.frontend.frontend import Frontend, State
from photon_grpc.server import metadata
from photon_grpc.server.metadata import Context
from photon_grpc.server.places import Places, silent_call

SERVICE = "grpc.health.v1.Health"
READINESS = "photon_grpc.v1.InferenceService"
LIVENESS = ""
#: Every connection of a client that asks for health has one open.
MAX_WATCHES = 4096
#: gRPC's clients open one again at once.
_LEAST_IDLE_S = 10.0

_SERVING: int = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN_SERVICE: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def file_proto() -> descriptor_pb2.FileDescriptorProto:
    """health.proto with List, whether or not the installed package has it."""
    file = descriptor_pb2.FileDescriptorProto()
    health_pb2.DESCRIPTOR.CopyToProto(file)
    if not any(method.name == "List" for method in file.service[0].method):
        _add_list(file)
    return file


def _add_list(file: descriptor_pb2.FileDescriptorProto) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    file.message_type.add(name="HealthListRequest")
    response = file.message_type.add(name="HealthListResponse")
    entry = response.nested_type.add(name="StatusesEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
    value = ".grpc.health.v1.HealthCheckResponse"
    entry.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE, type_name=value)
    statuses = ".grpc.health.v1.HealthListResponse.StatusesEntry"
    response.field.add(
        name="statuses", number=1, label=kinds.LABEL_REPEATED, type=kinds.TYPE_MESSAGE, type_name=statuses
    )
    package = ".grpc.health.v1"
    file.service[0].method.add(
        name="List", input_type=f"{package}.HealthListRequest", output_type=f"{package}.HealthListResponse"
    )


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(file_proto().SerializeToString())
DESCRIPTOR = _pool.FindFileByName(file_proto().name)


def message_class(name: str) -> Any:
    """The class of a message of health.proto, for example "HealthListResponse"."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"grpc.health.v1.{name}"))


CheckRequest = message_class("HealthCheckRequest")
CheckResponse = message_class("HealthCheckResponse")
ListRequest = message_class("HealthListRequest")
ListResponse = message_class("HealthListResponse")


class HealthService:
    """Follows the front end's state. `withdraw` and `close` are the two steps of a stop."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._is_withdrawn = False
        self._is_closed = False
        self._change = asyncio.Event()
        self.places = Places("health watches", MAX_WATCHES, least_idle_s=_LEAST_IDLE_S)
        frontend.on_state(lambda state: self._announce())

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self.Check, CheckRequest.FromString, CheckResponse.SerializeToString
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.Watch, CheckRequest.FromString, CheckResponse.SerializeToString
            ),
            "List": grpc.unary_unary_rpc_method_handler(
                self.List, ListRequest.FromString, ListResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def withdraw(self) -> None:
        """Not ready any more, whatever the front end says."""
        self._is_withdrawn = True
        self._announce()

    def close(self) -> None:
        """End every Watch once it has told the last status; an open one would hold up the server's stop."""
        self._is_closed = True
        self._announce()

    async def Check(self, request: Any, context: Context) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN_SERVICE:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return CheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> None:
        """Every status, when it changes. Raise QueueFull, IdleStreamEvicted."""
        with silent_call(self.places, metadata.holder()):
            await self._tell(request, context)

    async def _tell(self, request: Any, context: Context) -> None:
        told = None
        while True:
            change = self._change
            status = self._status(request.service)
            if status != told:
                await context.write(CheckResponse(status=status))
                told = status
            if self._is_closed:
                return
            await change.wait()

    async def List(self, request: Any, context: Context) -> Any:
        return ListResponse(statuses={name: CheckResponse(status=self._status(name)) for name in (LIVENESS, READINESS)})

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return _NOT_SERVING if self._frontend.state is State.FAILED else _SERVING
        if service == READINESS:
            is_ready = self._frontend.state is State.SERVING and not self._is_withdrawn
            return _SERVING if is_ready else _NOT_SERVING
        return _UNKNOWN_SERVICE

    def _announce(self) -> None:
        # Every Watch holds the event it waits for; the next change gets another one.
        self._change.set()
        self._change = asyncio.Event()
