"""The state that all connections of one HTTP server share."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate

from uvicorn.server import ServerState

from photon_grpc.access.places import Places, WaitingPlaces
from photon_grpc.gateway.connections.exchange import AppErrors
from photon_grpc.gateway.connections.limits import ConnectionLimits
from photon_grpc.gateway.connections.refusal import Headers, Refusals
from photon_grpc.gateway.connections.tls import HttpCertificates

#: An idle body of the caller that needs its memory for another gives way after this time.
_LEAST_IDLE_S = 1.0


class HttpServerState(ServerState):
    """Limits, places and counts of all connections of a server."""

    def __init__(
        self,
        limits: ConnectionLimits,
        max_body_bytes: int,
        refusals: Refusals,
        certificates: HttpCertificates | None = None,
    ) -> None:
        super().__init__()
        self.refusals = refusals
        self.limits = limits
        self.max_body_bytes = max_body_bytes
        self.certificates = certificates
        self.is_draining = False
        self.errors = AppErrors()
        self.places = Places("HTTP connections", limits.max_connections, oldest_first=False)
        self.held = WaitingPlaces(
            "bytes of bodies", limits.max_held_bytes, least_idle_s=_LEAST_IDLE_S, oldest_first=False
        )
        self._date_s = 0
        self._is_empty = asyncio.Event()

    def heed_departure(self) -> None:
        if not self.connections:
            self._is_empty.set()

    async def wait_until_empty(self) -> None:
        """Wait until no connection is left."""
        self._is_empty.clear()
        if self.connections:
            await self._is_empty.wait()

    def headers(self) -> Headers:
        """Return the headers of every response: the date."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s = now_s
            self.default_headers = [(b"date", formatdate(now_s, usegmt=True).encode())]
        return self.default_headers
