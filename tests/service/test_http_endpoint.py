"""Pages in plain HTTP: who reads nothing, sends nothing or too much disturbs no other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest

from photon_grpc.errors import ConfigError
from photon_grpc.service.endpoints.http import MAX_CONNECTIONS, HttpEndpoint, Page

LARGE = b"x" * (64 << 20)


def broken(accept: str) -> Page:
    raise RuntimeError("of no concern to a scraper")


PAGES = {
    "/ready": lambda accept: Page(f"{accept}\n".encode()),
    "/late": lambda accept: Page(b"no\n", status=HTTPStatus.SERVICE_UNAVAILABLE),
    "/large": lambda accept: Page(LARGE),
    "/broken": broken,
}


@contextlib.asynccontextmanager
async def served(timeout_s: float = 60.0) -> AsyncIterator[tuple[HttpEndpoint, int]]:
    endpoint = HttpEndpoint(PAGES, timeout_s=timeout_s)
    address = await endpoint.start("127.0.0.1:0")
    try:
        yield endpoint, int(address.rpartition(":")[2])
    finally:
        endpoint.close()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()


async def asked(port: int, request: str) -> tuple[str, str]:
    """Return the status line and the body."""
    async with connected(port) as (reader, writer):
        writer.write(request.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        answer = (await asyncio.wait_for(reader.read(), 120)).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return head.partition("\r\n")[0], body


@pytest.mark.parametrize(
    ("request_", "status", "body"),
    [
        ("GET /ready HTTP/1.1\nHost: a\nAccept: text/b", "200 OK", "text/b\n"),
        ("GET /ready?a=b HTTP/1.0", "200 OK", "\n"),
        ("HEAD /ready HTTP/1.1\nAccept: text/b", "200 OK", ""),
        ("GET /late HTTP/1.1", "503 Service Unavailable", "no\n"),
        ("GET / HTTP/1.1", "404 Not Found", "the pages are /ready, /late, /large, /broken\n"),
        ("POST /ready HTTP/1.1\nContent-Length: 5", "405 Method Not Allowed", "GET and HEAD only\n"),
        ("GET /broken HTTP/1.1", "500 Internal Server Error", "the log has the reason\n"),
        ("\xff", "404 Not Found", "the pages are /ready, /late, /large, /broken\n"),
    ],
)
async def test_a_page(request_: str, status: str, body: str) -> None:
    async with served() as (_, port):
        assert await asked(port, request_) == (f"HTTP/1.1 {status}", body)


async def test_connections_that_say_nothing_make_room_for_those_that_come() -> None:
    async with served() as (endpoint, port), contextlib.AsyncExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            await stack.enter_async_context(connected(port))
        assert await asked(port, "GET /ready HTTP/1.1") == ("HTTP/1.1 200 OK", "\n")
        assert len(endpoint._open) <= MAX_CONNECTIONS


@pytest.mark.parametrize("sent", [b"", b"GET /ready HTTP/1.1\r\n", b"GET /large HTTP/1.1\r\n\r\n"])
async def test_one_that_never_reads_or_never_ends_is_cut_off(sent: bytes) -> None:
    async with served(timeout_s=0.3) as (endpoint, port), connected(port) as (reader, writer):
        writer.write(sent)
        await asyncio.sleep(0.1)
        assert await asked(port, "GET /ready HTTP/1.1") == ("HTTP/1.1 200 OK", "\n")
        for _ in range(6000):
            if not endpoint._open:
                break
            await asyncio.sleep(0.01)
        assert not endpoint._open
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read(len(LARGE))) < len(LARGE)


async def test_a_head_without_end_is_not_gathered() -> None:
    async with served() as (_, port), connected(port) as (reader, writer):
        writer.write(b"GET /ready HTTP/1.1\r\nA: " + b"x" * (1 << 20))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 120) == b""


async def test_an_address_in_use_is_refused_with_what_to_do() -> None:
    async with served() as (_, port):
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port} .*--metrics-listen"):
            await HttpEndpoint(PAGES).start(f"127.0.0.1:{port}")
