"""A server's life: it listens, drains and stops. The client is httpx, which shares no code with the server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket

import httpx
import pytest

from photon_grpc.errors import ConfigError
from photon_grpc.gateway.connections.http_server import HttpServer
from tests.gateway.echo_server import EchoApp, answer_to, connect, get, opened, status, to_the_end

CLOSE = b"Connection: close\r\n"


@pytest.fixture
def app() -> EchoApp:
    return EchoApp()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def test_an_independent_client_is_answered(app: EchoApp) -> None:
    async with (
        opened(app, max_body_bytes=1000) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        found = await client.get("/a", params={"b": "c"})
        assert found.json() == {"path": "/a", "num_bytes": 0}
        assert found.headers["date"] and "server" not in found.headers
        sent = await client.post("/b", json={"x": "ä" * 100})
        assert sent.json()["num_bytes"] == len(sent.request.content)
        too_large = await client.post("/c", json="x" * 5_000_000)
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "BODY_TOO_LARGE")

        async def chunks() -> object:
            for _ in range(3):
                yield b"x" * 100

        streamed = await client.post("/d", content=chunks(), headers={"content-type": "application/json"})
        assert streamed.json()["num_bytes"] == 300
        assert (await client.head("/e")).status_code == 200
        answers = await asyncio.gather(*(client.get(f"/{number}") for number in range(50)))
        assert {answer.json()["path"] for answer in answers} == {f"/{number}" for number in range(50)}


async def test_it_listens_at_several_addresses(app: EchoApp) -> None:
    server = HttpServer(app)
    one, other = await server.start(["127.0.0.1:0", "[::1]:0"], reuse_port=False)
    try:
        assert one.startswith("127.0.0.1:") and other.startswith("[::1]:")
        async with httpx.AsyncClient() as client:
            for address in (one, other):
                assert (await client.get(f"http://{address}/")).status_code == 200
        assert app.connections[1].peer.startswith("ipv6:[::1]:")
    finally:
        await server.stop(0.0)


async def test_processes_may_share_a_port(app: EchoApp) -> None:
    one, other = HttpServer(app), HttpServer(app)
    try:
        (bound,) = await one.start(["127.0.0.1:0"], reuse_port=True)
        assert await other.start([bound], reuse_port=True) == (bound,)
    finally:
        await one.stop(0.0)
        await other.stop(0.0)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "127.0.0.1:99999", "no.such.host.invalid:0", "unix:/x"])
async def test_an_address_that_cannot_be_used_is_refused_and_the_others_released(app: EchoApp, address: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = f"127.0.0.1:{free.getsockname()[1]}"
    server = HttpServer(app)
    with pytest.raises(ConfigError) as refused:
        await server.start([first, address], reuse_port=False)
    assert refused.value.field == "--http-listen"
    assert "--http-listen" in str(refused.value) and address in str(refused.value)
    await asyncio.sleep(0)
    assert await server.start([first], reuse_port=False) == (first,)
    await server.stop(0.0)


async def test_a_port_in_use_is_refused(app: EchoApp) -> None:
    async with opened(app) as port:
        with pytest.raises(ConfigError, match="in use"):
            await HttpServer(app).start([f"127.0.0.1:{port}"], reuse_port=False)


async def test_draining_closes_idle_connections_and_the_others_after_their_answer(app: EchoApp) -> None:
    server = HttpServer(app)
    (bound,) = await server.start(["127.0.0.1:0"], reuse_port=False)
    idle, busy = await connect(port_of(bound)), await connect(port_of(bound))
    busy[1].write(get("/wait"))
    await app.arrived.wait()
    server.draining()
    assert await to_the_end(idle[0]) == b""
    late = await answer_to(port_of(bound), get("/late"))
    assert status(late) == 200 and b"connection: close" in late
    app.may_answer.set()
    answer = await to_the_end(busy[0])
    assert status(answer) == 200 and b"connection: close" in answer
    await server.stop(0.0)


async def test_stopping_waits_for_answers_and_then_aborts_them(app: EchoApp) -> None:
    server = HttpServer(app)
    (bound,) = await server.start(["127.0.0.1:0"], reuse_port=False)
    reader, writer = await connect(port_of(bound))
    writer.write(get("/wait"))
    await app.arrived.wait()
    stopping = asyncio.create_task(server.stop(30.0))
    await asyncio.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        await connect(port_of(bound))
    app.may_answer.set()
    assert status(await to_the_end(reader)) == 200
    await stopping


async def test_an_answer_that_lasts_longer_is_aborted(app: EchoApp) -> None:
    server = HttpServer(app)
    (bound,) = await server.start(["127.0.0.1:0"], reuse_port=False)
    reader, writer = await connect(port_of(bound))
    writer.write(get("/wait"))
    await app.arrived.wait()
    await server.stop(0.05)
    assert await to_the_end(reader) == b""
    assert app.left.is_set()
    assert server.num_connections == 0


async def test_signals_and_the_loop_stay_with_their_owner(app: EchoApp) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with opened(app) as port:
        assert status(await answer_to(port, get(more=CLOSE))) == 200
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with contextlib.suppress(OSError):
        await answer_to(port, get())
