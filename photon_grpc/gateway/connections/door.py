"""The HTTP server of a front end, around an ASGI app."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from uvicorn.config import Config

from photon_grpc.config.resolve import split_address
from photon_grpc.errors import ConfigError
from photon_grpc.gateway.connections.connection import Connection
from photon_grpc.gateway.connections.door_state import DoorState
from photon_grpc.gateway.connections.limits import MAX_BODY_BYTES, ConnectionLimits
from photon_grpc.gateway.connections.policy import Policy
from photon_grpc.gateway.connections.tls import HttpCertificates

_FLAG = "--http-listen"
_BACKLOG = 1024
#: A peer that vanished without a word is noticed after about two minutes.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class Door:
    """Listens, drains and stops. Belongs to the event loop that runs.

    It uses uvicorn's protocol and ASGI cycle, not its Server, which owns signals and the loop, ends the process when a
    port is taken, and polls ten times a second. Listening and stopping take the few lines below.
    """

    def __init__(
        self,
        app: Any,
        *,
        certificates: HttpCertificates | None = None,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Take the app; with `certificates` the door speaks TLS. Hosts and origins: see Policy."""
        self._limits = limits or ConnectionLimits()
        self._state = DoorState(self._limits, max_body_bytes, certificates)
        self._policy = Policy(app, allowed_hosts, allowed_origins)
        self._config = _configuration(self._policy)
        self._servers: list[asyncio.Server] = []

    async def start(self, addresses: Sequence[str], *, reuse_port: bool) -> tuple[str, ...]:
        """Listen at HOST:PORT addresses; return them with the ports that were chosen. Raise ConfigError."""
        bound: list[str] = []
        try:
            for address in addresses:
                listener = _listen(address, reuse_port, self._limits.max_unsent_bytes)
                self._servers.append(await self._serve(listener))
                bound.append(_spelled(address, listener))
        except ConfigError:
            self._close_listeners()
            raise
        self._policy.listen(bound)
        return tuple(bound)

    def draining(self) -> None:
        """Close idle connections now and the others after their running answer."""
        self._state.is_draining = True
        for connection in tuple(self._state.connections):
            connection.shutdown()

    async def stop(self, timeout_s: float) -> None:
        """Stop listening, wait for running answers, then abort them."""
        self._close_listeners()
        self.draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._state.wait_until_empty()
        await self._abort()

    @property
    def num_connections(self) -> int:
        return self._state.places.size

    async def _serve(self, listener: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: Connection(self._config, self._state), sock=listener, backlog=_BACKLOG)

    def _close_listeners(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def _abort(self) -> None:
        for connection in tuple(self._state.connections):
            connection.transport.abort()
        tasks = [*self._state.tasks, *self._state.handshakes]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


def _configuration(app: Any) -> Config:
    config = Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        # A task must not inherit the variables of the call before it.
        reset_contextvars=True,
    )
    config.load()
    return config


def _listen(address: str, reuse_port: bool, max_unsent_bytes: int) -> socket.socket:
    host, port = split_address(address, _FLAG)
    if host.startswith("unix:"):
        raise ConfigError(f"{_FLAG} {address}: HTTP listens at HOST:PORT", field=_FLAG)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refused(address, error) from None
    try:
        _set_options(listener, reuse_port, max_unsent_bytes)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(address, error) from None
    listener.setblocking(False)
    return listener


def _set_options(listener: socket.socket, reuse_port: bool, max_unsent_bytes: int) -> None:
    """Set options, which accepted connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel would take megabytes for a client that does not read, which hides that it stalls.
    for name, value in (*_KEEPALIVE, ("TCP_NOTSENT_LOWAT", max_unsent_bytes)):
        if (option := getattr(socket, name, None)) is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def _spelled(address: str, listener: socket.socket) -> str:
    return f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"


def _refused(address: str, error: OSError) -> ConfigError:
    problem = (error.strerror or "the system refused it").lower()
    return ConfigError(f"cannot listen at {address}: {problem}; choose another address ({_FLAG})", field=_FLAG)
