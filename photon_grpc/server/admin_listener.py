"""AdminService on its own listener: a Unix socket guarded by its mode, or a port that needs the scope `admin`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc

from photon_grpc.admin.v1 import admin_pb2, admin_pb2_grpc
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.server import addresses
from photon_grpc.server.admin import AdminService
from photon_grpc.server.calls import methods
from photon_grpc.server.calls.guard import NO_KEYS, CallRules, Guard
from photon_grpc.server.server import CLOSING_S, transport_options
from photon_grpc.server.standard import reflection
from photon_grpc.server.tls import Certificates

_SOCKET_MODE = 0o660
#: Room for request ids and the list of a full quarantine.
_MAX_MESSAGE_BYTES = 2 << 20


class AdminListener:
    """The listener. It outlives the drain that a caller requests, to answer it."""

    def __init__(
        self,
        frontend: Frontend,
        *,
        drain: Callable[[float | None], None],
        rules: CallRules,
        certificates: Certificates | None = None,
    ) -> None:
        """Take what a listener needs; keys and certificates apply to a port only. See AdminService for `drain`."""
        self._service = AdminService(frontend, drain)
        self._reflecting = reflection.places()
        self._rules = rules
        self._certificates = certificates
        self._grpc: grpc.aio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen; return the address bound. Raise ConfigError."""
        rules = replace(self._rules, keys=NO_KEYS) if address.startswith("unix:") else self._rules
        guard = Guard(rules, reading=(self._reflecting,))
        options = transport_options(_MAX_MESSAGE_BYTES, reuse_port=False)
        server = grpc.aio.server(interceptors=(guard,), options=options)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._service, server)
        server.add_generic_rpc_handlers((_former_name(self._service),))
        name = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
        server.add_generic_rpc_handlers(reflection.handlers((name,), self._reflecting))
        credentials = self._certificates.credentials() if self._certificates else None
        bound = addresses.bind(server, address, reuse_port=False, credentials=credentials, unix_mode=_SOCKET_MODE)
        await server.start()
        self._grpc = server
        return bound

    async def stop(self, num_left: int) -> None:
        """Answer the open calls and stop. The service has drained, and `num_left` requests still ran."""
        self._service.close(num_left)
        if self._grpc is not None:
            await self._grpc.stop(CLOSING_S)


class _Handlers:
    """The part of a server that takes the handlers of a service."""

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Take handlers by path, which `by_name` has, too."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.by_name = handlers


def _former_name(service: AdminService) -> grpc.GenericRpcHandler:
    """Return handlers of the service under its name before it had its own package; the messages are the same."""
    handlers = _Handlers()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, handlers)  # type: ignore[arg-type]
    return grpc.method_handlers_generic_handler(methods.FORMER_ADMIN, handlers.by_name)
