"""A server with a small app behind it, and clients that write bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from photon_grpc.gateway.connections.http_server import HttpServer

#: No test waits for so long unless it fails.
PATIENCE_S = 30.0
LOCAL = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"


@dataclass
class Seen:
    """A request as the app got it."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    #: How the app learnt that its client left.
    is_lost: bool = False
    was_told: bool = False


@dataclass
class EchoApp:
    """Remembers requests and answers with the size of the body.

    /wait answers when `may_answer` is set, /stream sends pieces of 64 KiB until nobody reads, /early answers without
    reading the body, /fail raises, /fail-late raises after the first piece.
    """

    seen: list[Seen] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    num_pieces: int = 0
    connections: list[Any] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Seen(scope["method"], scope["path"], scope["query_string"], list(scope["headers"]))
        self.seen.append(request)
        connection = scope["extensions"]["photon.connection"]
        self.connections.append(connection)
        connection.on_lost(lambda: self._lost(request))
        self.arrived.set()
        if request.path != "/early":
            await self._read(request, receive)
        if request.path == "/fail":
            raise ValueError(request.body.decode())
        if request.path == "/wait":
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        if request.path == "/fail-late":
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise ValueError(request.body.decode())
        while request.path == "/stream" and not request.is_lost:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.num_pieces += 1
        body = json.dumps({"path": request.path, "num_bytes": len(request.body)}).encode()
        await send({"type": "http.response.body", "body": body})

    def _lost(self, request: Seen) -> None:
        assert not request.is_lost
        request.is_lost = True
        self.left.set()

    async def _read(self, request: Seen, receive: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                request.was_told = True
                return
            request.body += message["body"]
            if not message["more_body"]:
                return


@contextlib.asynccontextmanager
async def opened(app: Any, **settings: Any) -> AsyncIterator[int]:
    """Open a server on a free port and return the port."""
    server = HttpServer(app, **settings)
    (bound,) = await server.start(["127.0.0.1:0"], reuse_port=False)
    try:
        yield int(bound.rpartition(":")[2])
    finally:
        await server.stop(0.0)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def answer_to(port: int, data: bytes, *, half_close: bool = False) -> bytes:
    """Return all that comes back until the server closes."""
    reader, writer = await connect(port)
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        return await to_the_end(reader)
    finally:
        writer.close()


async def to_the_end(reader: asyncio.StreamReader) -> bytes:
    received = b""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                received += piece
    return received


def get(path: str = "/", more: bytes = b"") -> bytes:
    return b"GET " + path.encode() + b" HTTP/1.1\r\n" + LOCAL + more + b"\r\n"


def post(body: bytes, path: str = "/", more: bytes = b"") -> bytes:
    length = f"Content-Length: {len(body)}\r\n".encode()
    return b"POST " + path.encode() + b" HTTP/1.1\r\n" + LOCAL + JSON + length + more + b"\r\n" + body


def status(answer: bytes) -> int:
    """Return the status of an answer that is complete and alone; 0 if there is none."""
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) <= 1, answer
    return int(answer[9:12]) if answer else 0


def code(answer: bytes) -> str:
    """Return the code of an error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return str(error["code"])
