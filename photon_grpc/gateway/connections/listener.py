"""A listening socket of the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from uvicorn.config import Config

from photon_grpc.config.resolve import split_address
from photon_grpc.errors import ConfigError, QueueFull
from photon_grpc.gateway.connections.connection import HttpConnection
from photon_grpc.gateway.connections.refusal import HttpRefusal, PartialRequest
from photon_grpc.gateway.connections.server_state import HttpServerState

_LOG = logging.getLogger(__name__)
_FLAG = "--http-listen"
_BACKLOG = 1024
#: Pause after an accept that failed, which it does while the process may open no more files.
_PAUSE_S = 1.0
#: Time for a client's end of TLS.
_TLS_SHUTDOWN_S = 5.0
#: A client that vanished without a word is noticed after two minutes.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class Listener:
    """Accepts connections. Each takes its place before its handshake, for which asyncio's own servers have no hook."""

    def __init__(self, address: str, config: Config, state: HttpServerState, *, reuse_port: bool) -> None:
        """Listen at HOST:PORT. Raise ConfigError."""
        self._config = config
        self._state = state
        self._socket = _listening(address, reuse_port, state.limits.max_unsent_bytes)
        #: The address, with the port that was chosen for port 0.
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        self._arrivals: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Stop listening. Connections stay; those in a handshake do not."""
        tasks = [self._accepting, *self._arrivals]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                raw, peername = await loop.sock_accept(self._socket)
            except OSError as error:
                _LOG.warning("no HTTP connection can be accepted: %s", error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            task = loop.create_task(self._welcome(raw, peername))
            self._arrivals.add(task)
            task.add_done_callback(self._arrivals.discard)

    async def _welcome(self, raw: socket.socket, peername: object) -> None:
        connection = HttpConnection(self._config, self._state)
        try:
            connection.arrive(peername)
        except QueueFull as error:
            self._refuse(raw, error)
            return
        try:
            await self._connect(connection, raw)
        except BaseException as error:
            connection.leave()
            if isinstance(error, (OSError, asyncio.CancelledError)):
                return
            if not isinstance(error, Exception):
                raise
            self._state.errors.report(error)

    async def _connect(self, connection: HttpConnection, raw: socket.socket) -> None:
        loop, certificates = asyncio.get_running_loop(), self._state.certificates
        if certificates is None:
            await loop.connect_accepted_socket(lambda: connection, raw)
            return
        with contextlib.ExitStack() as to_close:
            to_close.enter_context(raw)
            context = certificates.context()
            to_close.pop_all()
        await loop.connect_accepted_socket(
            lambda: connection,
            raw,
            ssl=context,
            ssl_handshake_timeout=self._state.limits.handshake_timeout_s,
            ssl_shutdown_timeout=_TLS_SHUTDOWN_S,
        )

    def _refuse(self, raw: socket.socket, error: QueueFull) -> None:
        with raw, contextlib.suppress(OSError):
            if self._state.certificates is None:
                refusal = HttpRefusal.of(error)
                raw.send(self._state.refusals.response(refusal, PartialRequest(), self._state.headers()))
                raw.shutdown(socket.SHUT_WR)


def _listening(address: str, reuse_port: bool, max_unsent_bytes: int) -> socket.socket:
    try:
        host, port = split_address(address, _FLAG)
    except ConfigError as error:
        raise ConfigError(error.message, field=_FLAG) from None
    if host.startswith("unix:"):
        raise ConfigError(f"{_FLAG} {address}: HTTP listens at HOST:PORT", field=_FLAG)
    with contextlib.ExitStack() as to_close:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
            listening = to_close.enter_context(socket.socket(family, kind, protocol))
            _set_options(listening, reuse_port, max_unsent_bytes)
            listening.bind(where)
            listening.listen(_BACKLOG)
        except OSError as error:
            problem = (error.strerror or "the system refused it").lower()
            text = f"cannot listen at {address}: {problem}; choose another address ({_FLAG})"
            raise ConfigError(text, field=_FLAG) from None
        listening.setblocking(False)
        to_close.pop_all()
        return listening


def _set_options(listening: socket.socket, reuse_port: bool, max_unsent_bytes: int) -> None:
    """Set options, which accepted connections inherit."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel would take megabytes for a client that does not read, which hides that it stalls.
    for name, value in (*_KEEPALIVE, ("TCP_NOTSENT_LOWAT", max_unsent_bytes)):
        if (option := getattr(socket, name, None)) is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)
    if listening.family == socket.AF_INET6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
