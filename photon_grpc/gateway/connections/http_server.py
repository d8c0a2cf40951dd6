"""The HTTP server of a front end, around an ASGI app."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from uvicorn.config import Config

from photon_grpc.errors import ConfigError
from photon_grpc.gateway.connections.connection import HttpConnection
from photon_grpc.gateway.connections.limits import MAX_BODY_BYTES, ConnectionLimits
from photon_grpc.gateway.connections.listener import Listener
from photon_grpc.gateway.connections.policy import HttpPolicy
from photon_grpc.gateway.connections.refusal import RefusalCounts, Refusals
from photon_grpc.gateway.connections.server_state import HttpServerState
from photon_grpc.gateway.connections.tls import HttpCertificates


class HttpServer:
    """Listens, drains and stops. Belongs to the event loop that runs.

    It uses uvicorn's protocol and ASGI cycle, not its Server, which owns signals and the loop, ends the process when a
    port is taken, and polls ten times a second. What is left of it are the few lines below and in Listener.
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
        counts: RefusalCounts | None = None,
        replica_id: str = "",
    ) -> None:
        """Take the app; with `certificates` the server speaks TLS. Hosts and origins: see HttpPolicy.

        `counts` and `replica_id` are for requests that the app never sees.
        """
        refusals = Refusals(counts, replica_id)
        self._limits = limits or ConnectionLimits()
        self._state = HttpServerState(self._limits, max_body_bytes, refusals, certificates)
        self._policy = HttpPolicy(app, allowed_hosts, allowed_origins, refusals)
        self._config = _configuration(self._policy)
        self._listeners: list[Listener] = []

    async def start(self, addresses: Sequence[str], *, reuse_port: bool) -> tuple[str, ...]:
        """Listen at HOST:PORT addresses; return them with the ports that were chosen. Raise ConfigError."""
        try:
            for address in addresses:
                self._listeners.append(Listener(address, self._config, self._state, reuse_port=reuse_port))
        except ConfigError:
            await self._close_listeners()
            raise
        bound = tuple(listener.address for listener in self._listeners)
        self._policy.listen(bound)
        return bound

    def draining(self) -> None:
        """Close idle connections now and the others after their running answer."""
        self._state.is_draining = True
        for connection in tuple(self._state.connections):
            connection.shutdown()

    async def stop(self, timeout_s: float) -> None:
        """Stop listening, wait for running answers, then abort them."""
        await self._close_listeners()
        self.draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._state.wait_until_empty()
        await self._abort()

    @property
    def num_connections(self) -> int:
        return self._state.places.size

    async def _close_listeners(self) -> None:
        listeners, self._listeners = self._listeners, []
        await asyncio.gather(*(listener.close() for listener in listeners))

    async def _abort(self) -> None:
        for connection in tuple(self._state.connections):
            connection.transport.abort()
        tasks = tuple(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


def _configuration(app: Any) -> Config:
    config = Config(
        app,
        http=HttpConnection,
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
