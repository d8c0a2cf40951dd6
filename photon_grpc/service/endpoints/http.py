"""Small pages in plain HTTP for scrapers and probes.

A client that reads or sends nothing is disconnected after 5 s and takes no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from email.parser import BytesHeaderParser
from http import HTTPStatus

from photon_grpc.access.places import Places
from photon_grpc.config.resolve import split_address
from photon_grpc.errors import ConfigError, PhotonError, QueueFull
from photon_grpc.service.endpoints.pages import Page, Render, render, text_page

#: At this limit a new connection ends the oldest one of the host that has most.
MAX_CONNECTIONS = 64
#: Time from the connection to the last byte of the answer.
TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 8 * 1024
_END_OF_HEAD = b"\r\n\r\n"


class _Connection:
    """One connection, which counts as idle from its beginning, so that any may be evicted."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.host = str((writer.get_extra_info("peername") or ("",))[0])
        self._since_s = time.monotonic()

    def idle_since_s(self) -> float:
        return self._since_s

    def evict(self, error: PhotonError) -> None:
        self.writer.transport.abort()


class HttpEndpoint:
    """A server for GET and HEAD on one event loop, with one request for each connection."""

    def __init__(self, pages: Mapping[str, Render], *, timeout_s: float = TIMEOUT_S) -> None:
        self._pages = pages
        self._timeout_s = timeout_s
        self.places = Places("connections for metrics", MAX_CONNECTIONS)
        self._open: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen; return HOST:PORT, with the actual port if it was 0. Raise ConfigError."""
        host, port = split_address(address, "--metrics-listen")
        try:
            self._server = await asyncio.start_server(self._serve, host.strip("[]"), port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address} for metrics: {error.strerror or error}; choose another address "
                "(--metrics-listen)",
                field="--metrics-listen",
            ) from None
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._open):
            connection.writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        try:
            place = self.places.take(connection.host, connection)
        except QueueFull:
            writer.transport.abort()
            return
        self._open.add(connection)
        with place:
            await self._answered(reader, writer)
        self._open.discard(connection)

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Makes `drain` wait until the system has taken all data.
        writer.transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            async with asyncio.timeout(self._timeout_s):
                writer.write(self._answer(await reader.readuntil(_END_OF_HEAD)))
                await writer.drain()
                writer.close()
        # The answer did not complete in time.
        if not writer.is_closing():
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        first, _, rest = head.partition(b"\r\n")
        method, path, *_ = [*first.decode("latin-1").split(" "), "", ""]
        page = self._page(method, path.partition("?")[0], BytesHeaderParser().parsebytes(rest).get("accept", ""))
        lines = (
            f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}",
            f"Content-Type: {page.content_type}",
            f"Content-Length: {len(page.body)}",
            "Connection: close",
        )
        return "\r\n".join((*lines, "\r\n")).encode("latin-1") + (b"" if method == "HEAD" else page.body)

    def _page(self, method: str, path: str, accept: str) -> Page:
        if path in self._pages and method not in ("GET", "HEAD"):
            return text_page(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only")
        return render(self._pages, path, accept)
