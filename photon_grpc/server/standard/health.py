"""grpc.health.v1.Health: Check, Watch, List. The service "" is liveness, the inference service's name readiness."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from photon_grpc.access.places import Places, silent_call
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.readiness import State
from photon_grpc.server.calls.call import current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.wire import descriptors

READINESS = "photon_grpc.v1.InferenceService"
LIVENESS = ""
#: Every connection of a health-checking client has one Watch open.
MAX_WATCHES = 4096
#: gRPC's clients reopen an evicted Watch at once.
_LEAST_IDLE_S = 10.0

CheckRequest = descriptors.message_class("grpc.health.v1.HealthCheckRequest")
CheckResponse = descriptors.message_class("grpc.health.v1.HealthCheckResponse")
ListRequest = descriptors.message_class("grpc.health.v1.HealthListRequest")
ListResponse = descriptors.message_class("grpc.health.v1.HealthListResponse")

_SERVING: int = CheckResponse.SERVING
_NOT_SERVING: int = CheckResponse.NOT_SERVING
_UNKNOWN_SERVICE: int = CheckResponse.SERVICE_UNKNOWN


class HealthService:
    """The service, which follows the front end's state. `withdraw` and `close` are the two steps of a stop."""

    def __init__(self, frontend: Frontend, services: Iterable[str] = ()) -> None:
        """Take the front end, and the `services` that are ready when the inference service is."""
        self._frontend = frontend
        self._ready = (READINESS, *services)
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
        return grpc.method_handlers_generic_handler(descriptors.HEALTH, methods)

    def withdraw(self) -> None:
        """Report not ready from now on, whatever the front end's state."""
        self._is_withdrawn = True
        self._announce()

    def close(self) -> None:
        """End every Watch after its last status; an open one would delay the server's stop."""
        self._is_closed = True
        self._announce()

    async def Check(self, request: Any, context: Context) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN_SERVICE:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return CheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> None:
        """Send the status whenever it changes. Raise QueueFull, IdleStreamEvicted."""
        with silent_call(self.places, current().caller):
            await self._send_statuses(request, context)

    async def _send_statuses(self, request: Any, context: Context) -> None:
        sent = None
        while True:
            change = self._change
            status = self._status(request.service)
            if status != sent:
                await context.write(CheckResponse(status=status))
                sent = status
            if self._is_closed:
                return
            await change.wait()

    async def List(self, request: Any, context: Context) -> Any:
        return ListResponse(
            statuses={name: CheckResponse(status=self._status(name)) for name in (LIVENESS, *self._ready)}
        )

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return _NOT_SERVING if self._frontend.state is State.FAILED else _SERVING
        if service in self._ready:
            is_ready = self._frontend.state is State.SERVING and not self._is_withdrawn
            return _SERVING if is_ready else _NOT_SERVING
        return _UNKNOWN_SERVICE

    def _announce(self) -> None:
        # Every Watch holds the event that it waits for; the next change needs another one.
        self._change.set()
        self._change = asyncio.Event()
