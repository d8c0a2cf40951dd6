"""Connections over real sockets: forms of requests, every limit, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable

import pytest

from photon_grpc.gateway.connections.head import HeadLimits
from photon_grpc.gateway.connections.limits import ConnectionLimits
from tests.gateway.echo_server import (
    JSON,
    LOCAL,
    PATIENCE_S,
    EchoApp,
    answer_to,
    code,
    connect,
    get,
    opened,
    post,
    status,
    to_the_end,
    until,
)

CLOSE = b"Connection: close\r\n"
CHUNKED = b"POST / HTTP/1.1\r\n" + LOCAL + JSON + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def app() -> EchoApp:
    return EchoApp()


def body_of(answer: bytes) -> bytes:
    """Return the body of an answer in chunks."""
    chunks, found = answer.partition(b"\r\n\r\n")[2], b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        found, chunks = found + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]
    return found


class TestRequests:
    async def test_a_body_arrives_whole(self, app: EchoApp) -> None:
        async with opened(app) as port:
            answer = await answer_to(port, post(b"x" * 1_000_000, "/a%20b?c=d", CLOSE))
        assert status(answer) == 200
        assert json.loads(body_of(answer)) == {"path": "/a b", "num_bytes": 1_000_000}
        assert (app.seen[0].method, app.seen[0].query) == ("POST", b"c=d")

    async def test_a_chunked_body_arrives_without_its_trailers(self, app: EchoApp) -> None:
        async with opened(app) as port:
            chunks = b"3\r\nabc\r\n2;note=x\r\nde\r\n0\r\nAuthorization: Bearer y\r\n\r\n"
            answer = await answer_to(port, CHUNKED.replace(JSON, JSON + CLOSE) + chunks)
        assert status(answer) == 200
        assert app.seen[0].body == b"abcde"
        assert b"authorization" not in dict(app.seen[0].headers)

    async def test_requests_follow_each_other_on_a_connection(self, app: EchoApp) -> None:
        async with opened(app) as port:
            answer = await answer_to(port, get("/1") + post(b"22", "/2") + b"\r\n" + get("/3", CLOSE))
        assert [request.path for request in app.seen] == ["/1", "/2", "/3"]
        assert answer.count(b"HTTP/1.1 200 OK") == 3

    async def test_a_request_may_arrive_byte_by_byte(self, app: EchoApp) -> None:
        async with opened(app) as port:
            reader, writer = await connect(port)
            for byte in post(b"abc", more=CLOSE):
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert status(await to_the_end(reader)) == 200
        assert app.seen[0].body == b"abc"

    async def test_what_is_sent_ahead_is_bounded(self, app: EchoApp) -> None:
        async with opened(app) as port:
            reader, writer = await connect(port)
            writer.write(get("/wait") + get("/ahead") * 10_000)
            await app.arrived.wait()
            await asyncio.sleep(0.05)
            (connection,) = app.connections
            assert len(connection._unread) <= ConnectionLimits().max_ahead_bytes
            app.may_answer.set()
            assert (await to_the_end(reader)).count(b"HTTP/1.1 200") == 1
        assert len(app.seen) == 1

    async def test_a_client_that_expects_100_continue_gets_it(self, app: EchoApp) -> None:
        async with opened(app) as port:
            reader, writer = await connect(port)
            writer.write(
                post(b"", more=CLOSE).replace(b"th: 0", b"th: 3").replace(CLOSE, CLOSE + b"Expect: 100-continue\r\n")
            )
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"abc")
            assert status(await to_the_end(reader)) == 200
        assert app.seen[0].body == b"abc"

    async def test_http_1_0_gets_no_chunks(self, app: EchoApp) -> None:
        async with opened(app) as port:
            answer = await answer_to(port, get().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"chunked" not in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"path": "/", "num_bytes": 0}

    async def test_an_offer_of_http_2_is_answered_in_http_1_with_its_body(self, app: EchoApp) -> None:
        offer = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        async with opened(app) as port:
            assert status(await answer_to(port, post(b"abc", more=offer))) == 200
        assert app.seen[0].body == b"abc"


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_bytes", "expected"),
        [
            (b"GET /\r\n\r\n", 400),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),
            (post(b"abc", more=b"Transfer-Encoding: chunked\r\n"), 400),
            (post(b"abc", more=b"Content-Length: 3\r\n"), 400),
            (get(more=b"Upgrade: websocket\r\nConnection: Upgrade\r\n"), 400),
            (get(more=b"X: " + b"x" * 20_000 + b"\r\n"), 431),
            (get(more=b"X: x\r\n" * 101), 431),
            (get("/" + "x" * 9_000), 414),
            (b"CONNECT localhost:22 HTTP/1.1\r\n" + LOCAL + b"\r\n", 405),
        ],
    )
    async def test_a_malformed_head_is_answered_and_never_reaches_the_app(
        self, app: EchoApp, request_bytes: bytes, expected: int
    ) -> None:
        async with opened(app) as port:
            # The second request is what would be smuggled.
            answer = await answer_to(port, request_bytes + get("/smuggled"))
        assert status(answer) == expected
        assert code(answer)
        assert not app.seen

    @pytest.mark.parametrize(
        "chunks",
        [
            b"3x\r\nabc\r\n0\r\n\r\n",
            b"-3\r\nabc\r\n0\r\n\r\n",
            b"0x3\r\nabc\r\n0\r\n\r\n",
            b"3 \r\nabc\r\n0\r\n\r\n",
            b"3\nabc\n0\n\n",
            b"3\r\nabcd\r\n0\r\n\r\n",
            b"2\r\nabc\r\n0\r\n\r\n",
            b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
            b"\r\nabc\r\n0\r\n\r\n",
            b"3\r\nabc\r\n0\r\nX: y\nX: z\r\n\r\n",
            b"3\r\nabc\r\n0\r\nno trailer\r\n\r\n",
        ],
    )
    async def test_bad_chunks_end_the_request(self, app: EchoApp, chunks: bytes) -> None:
        async with opened(app) as port:
            answer = await answer_to(port, CHUNKED + chunks + get("/smuggled"))
        assert status(answer) == 400
        assert code(answer) == "MALFORMED_REQUEST"
        assert [(request.path, request.was_told) for request in app.seen] == [("/", True)]

    async def test_bytes_behind_a_chunked_body_are_not_read(self, app: EchoApp) -> None:
        async with opened(app) as port:
            answer = await answer_to(port, CHUNKED + b"3\r\nabc\r\n0\r\n\r\n" + get("/smuggled"))
        assert status(answer) == 200
        assert b"connection: close" in answer
        assert [request.path for request in app.seen] == ["/"]

    async def test_a_large_body_is_refused_by_its_length_before_it_is_sent(self, app: EchoApp) -> None:
        async with opened(app, max_body_bytes=100) as port:
            answer = await answer_to(port, post(b"x" * 101).removesuffix(b"x" * 101))
        assert status(answer) == 413
        assert code(answer) == "BODY_TOO_LARGE"
        assert b"101" in answer and b"100" in answer
        assert not app.seen

    async def test_a_large_chunked_body_is_refused_while_it_arrives(self, app: EchoApp) -> None:
        async with opened(app, max_body_bytes=100) as port:
            answer = await answer_to(port, CHUNKED + b"40\r\n" + b"x" * 64 + b"\r\n25\r\n" + b"x" * 37 + b"\r\n")
        assert status(answer) == 413
        assert app.seen[0].is_lost

    async def test_a_body_in_chunks_of_one_byte_is_refused(self, app: EchoApp) -> None:
        piece = b"1;" + b"x" * 100 + b"\r\na\r\n"
        async with opened(app) as port:
            answer = await answer_to(port, CHUNKED + piece * 10_000)
        assert status(answer) == 400

    async def test_a_client_that_sends_on_reads_the_refusal(self, app: EchoApp) -> None:
        """Its bytes would reset a connection that was closed at once."""
        async with opened(app, max_body_bytes=100) as port:
            answer = await answer_to(port, post(b"x" * 3_000_000))
        assert status(answer) == 413

    async def test_an_answer_before_the_end_of_the_body_is_read_and_ends_the_connection(self, app: EchoApp) -> None:
        async with opened(app) as port:
            answer = await answer_to(port, post(b"x" * 3_000_000, "/early") + get("/next"))
        assert status(answer) == 200
        assert b"connection: close" in answer
        assert len(app.seen) == 1


class TestTime:
    LIMITS = ConnectionLimits(
        head_timeout_s=0.1, body_timeout_s=0.1, body_timeout_s_per_mib=0.0, idle_timeout_s=0.1, linger_s=0.1
    )

    async def test_a_silent_connection_is_closed_without_an_answer(self, app: EchoApp) -> None:
        """Browsers open connections in advance."""
        async with opened(app, limits=self.LIMITS) as port:
            assert await answer_to(port, b"") == b""

    @pytest.mark.parametrize("before", [b"", get()])
    async def test_a_slow_head_is_refused(self, app: EchoApp, before: bytes) -> None:
        async with opened(app, limits=self.LIMITS) as port:
            reader, writer = await connect(port)
            drip = asyncio.create_task(self._drip(writer, before + b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 1000))
            answer = await to_the_end(reader)
            drip.cancel()
        assert status(answer[answer.rindex(b"HTTP/1.1 ") :]) == 408
        assert code(answer) == "REQUEST_TIMEOUT" if not before else True
        assert len(app.seen) == bool(before)

    @pytest.mark.parametrize("head", [post(b"x" * 10_000).removesuffix(b"x" * 10_000), CHUNKED])
    async def test_a_slow_body_is_refused(self, app: EchoApp, head: bytes) -> None:
        async with opened(app, limits=self.LIMITS) as port:
            reader, writer = await connect(port)
            writer.write(head)
            drip = asyncio.create_task(self._drip(writer, b"1\r\nx\r\n" * 1000))
            answer = await to_the_end(reader)
            drip.cancel()
        assert status(answer) == 408
        assert app.seen[0].is_lost

    async def test_a_large_body_has_more_time(self, app: EchoApp) -> None:
        limits = ConnectionLimits(body_timeout_s=0.05, body_timeout_s_per_mib=60.0)
        async with opened(app, limits=limits) as port:
            reader, writer = await connect(port)
            request = post(b"x" * 300_000, more=CLOSE)
            writer.write(request[:200_000])
            await asyncio.sleep(0.2)
            writer.write(request[200_000:])
            assert status(await to_the_end(reader)) == 200

    async def test_an_idle_connection_is_closed(self, app: EchoApp) -> None:
        async with opened(app, limits=self.LIMITS) as port:
            assert status(await answer_to(port, get())) == 200

    async def test_a_running_answer_has_no_deadline(self, app: EchoApp) -> None:
        async with opened(app, limits=self.LIMITS) as port:
            reader, writer = await connect(port)
            writer.write(post(b"abc", "/wait", CLOSE))
            await asyncio.sleep(0.3)
            app.may_answer.set()
            assert status(await to_the_end(reader)) == 200

    async def _drip(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(data), 10):
                writer.write(data[start : start + 10])
                await asyncio.sleep(0.005)


class TestNumbers:
    async def test_beside_a_thousand_idle_connections_a_new_one_is_answered(self, app: EchoApp) -> None:
        async with opened(app) as port:
            idle = [await connect(port) for _ in range(1000)]
            assert status(await answer_to(port, get(more=CLOSE))) == 200
            # It took the place of the one that had been idle longest.
            assert await to_the_end(idle[0][0]) == b""
            idle[1][1].write(get(more=CLOSE))
            assert status(await to_the_end(idle[1][0])) == 200
            for _, writer in idle:
                writer.close()

    async def test_a_busy_connection_keeps_its_place(self, app: EchoApp) -> None:
        async with opened(app, limits=ConnectionLimits(max_connections=2)) as port:
            busy = [await connect(port) for _ in range(2)]
            for _, writer in busy:
                writer.write(get("/wait", CLOSE))
            await until(lambda: len(app.seen) == 2)
            refused = await answer_to(port, b"")
            assert status(refused) == 503
            assert code(refused) == "QUEUE_FULL"
            assert b"retry-after" in refused
            app.may_answer.set()
            for reader, _ in busy:
                assert status(await to_the_end(reader)) == 200
            assert status(await answer_to(port, get(more=CLOSE))) == 200

    async def test_bodies_share_their_memory(self, app: EchoApp) -> None:
        limits = ConnectionLimits(max_held_bytes=100_000)
        async with opened(app, limits=limits) as port:
            reader, writer = await connect(port)
            writer.write(post(b"x" * 80_000, "/wait", CLOSE))
            await until(lambda: bool(app.seen) and len(app.seen[0].body) == 80_000)
            refused = await answer_to(port, post(b"x" * 80_000))
            assert (status(refused), code(refused)) == (503, "QUEUE_FULL")
            assert status(await answer_to(port, post(b"x" * 10_000, more=CLOSE))) == 200
            app.connections[0].free_body()
            assert status(await answer_to(port, post(b"x" * 80_000, more=CLOSE))) == 200
            app.may_answer.set()
            assert status(await to_the_end(reader)) == 200

    async def test_a_body_that_stopped_arriving_gives_way_to_another_caller(self, app: EchoApp) -> None:
        limits = ConnectionLimits(max_held_bytes=100_000)
        async with opened(app, limits=limits) as port:
            reader, writer = await connect(port)
            writer.write(post(b"x" * 90_000).removesuffix(b"x"))
            await until(lambda: bool(app.seen) and len(app.seen[0].body) > 80_000)
            neighbour = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            neighbour[1].write(post(b"x" * 80_000, more=CLOSE))
            assert status(await to_the_end(neighbour[0])) == 200
            assert status(await to_the_end(reader)) == 503


class TestDepartures:
    async def test_the_app_is_told_when_its_client_leaves(self, app: EchoApp) -> None:
        async with opened(app) as port:
            _, writer = await connect(port)
            writer.write(get("/wait"))
            await app.arrived.wait()
            writer.transport.abort()
            async with asyncio.timeout(PATIENCE_S):
                await app.left.wait()
        assert app.connections[0].peer.startswith("ipv4:127.0.0.1:")
        assert app.connections[0].peer_host == "127.0.0.1"

    async def test_the_app_is_told_of_a_client_that_closed_without_a_reset(self, app: EchoApp) -> None:
        """Its FIN looks like that of a client that only closed its sending side."""
        async with opened(app) as port:
            _, writer = await connect(port)
            writer.write(get("/wait"))
            await app.arrived.wait()
            writer.close()
            async with asyncio.timeout(PATIENCE_S):
                await app.left.wait()

    async def test_a_client_that_closed_its_sending_side_gets_its_answers(self, app: EchoApp) -> None:
        async with opened(app) as port:
            answer = await answer_to(port, get("/1") + get("/2"), half_close=True)
        assert answer.count(b"HTTP/1.1 200 OK") == 2

    async def test_also_if_they_take_a_while(self, app: EchoApp) -> None:
        async with opened(app) as port:
            waiting = asyncio.create_task(answer_to(port, get("/wait"), half_close=True))
            await app.arrived.wait()
            await asyncio.sleep(0.6)
            app.may_answer.set()
            answer = await waiting
        assert answer.startswith(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n")

    async def test_half_a_request_ends_with_the_sending_side(self, app: EchoApp) -> None:
        async with opened(app) as port:
            assert await answer_to(port, get()[:-2], half_close=True) == b""
            assert await answer_to(port, post(b"abc")[:-1], half_close=True) == b""
        assert [request.is_lost for request in app.seen] == [True]

    async def test_also_behind_other_requests(self, app: EchoApp) -> None:
        async with opened(app) as port:
            answer = await answer_to(port, get("/1") + get("/2") + CHUNKED + b"3\r\nab", half_close=True)
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert [request.is_lost for request in app.seen] == [False, False, True]

    async def test_nobody_is_told_after_the_answer(self, app: EchoApp) -> None:
        async with opened(app) as port:
            _, writer = await connect(port)
            writer.write(get("/1"))
            await app.arrived.wait()
            await asyncio.sleep(0.02)
            writer.transport.abort()
            await asyncio.sleep(0.02)
        assert not app.seen[0].is_lost

    async def test_a_client_that_stops_reading_is_cut_off(self, app: EchoApp) -> None:
        async with opened(app, limits=ConnectionLimits(stalled_timeout_s=0.2)) as port:
            with socket.socket() as silent:
                silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                silent.connect(("127.0.0.1", port))
                silent.sendall(get("/stream"))
                async with asyncio.timeout(PATIENCE_S):
                    await app.left.wait()
        # The client's window, the kernel's unsent bytes and our own buffer.
        assert app.num_pieces < 20

    @pytest.mark.parametrize("max_unsent_bytes", [2**16, 2**24])
    async def test_a_client_that_never_reads_the_end_is_cut_off(self, app: EchoApp, max_unsent_bytes: int) -> None:
        """Its answer is complete for the app, and its connection is closed once everything is sent."""

        async def large(scope: object, receive: object, send: Callable[..., object]) -> None:
            await app(scope, receive, self._padded(send))

        limits = ConnectionLimits(stalled_timeout_s=0.2, max_unsent_bytes=max_unsent_bytes)
        async with opened(large, limits=limits) as port:
            with socket.socket() as silent:
                silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                silent.connect(("127.0.0.1", port))
                silent.sendall(get("/1", CLOSE))
                await app.arrived.wait()
                await until(lambda: app.connections[0]._is_lost)

    async def test_a_client_that_reads_slowly_gets_a_large_answer(self, app: EchoApp) -> None:
        async def large(scope: object, receive: object, send: Callable[..., object]) -> None:
            await app(scope, receive, self._padded(send))

        limits = ConnectionLimits(stalled_timeout_s=0.15, max_unsent_bytes=1000)
        async with opened(large, limits=limits) as port:
            received = b""
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                slow.connect(("127.0.0.1", port))
                slow.sendall(get("/1", CLOSE))
                slow.setblocking(False)
                while piece := await asyncio.get_running_loop().sock_recv(slow, 200_000):
                    received += piece
                    await asyncio.sleep(0.01)
        assert len(received) > 8_000_000

    def _padded(self, send: Callable[..., object]) -> Callable[..., object]:
        async def wrapped(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body":
                message["body"] = b"x" * 8_000_000
            await send(message)  # type: ignore[misc]

        return wrapped


class TestFailures:
    async def test_an_exception_of_the_app_reveals_nothing(
        self, app: EchoApp, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        async with opened(app) as port:
            answers = [await answer_to(port, post(b"private", "/fail?private=1")) for _ in range(5)]
            late = await answer_to(port, post(b"private", "/fail-late"))
        assert {status(answer) for answer in answers} == {500}
        assert {code(answer) for answer in answers} == {"INTERNAL_FAILURE"}
        assert not late.endswith(b"0\r\n\r\n")
        assert "ValueError" in caplog.text
        assert caplog.text.count("an HTTP call failed") == 2
        for text in (caplog.text, *map(bytes.decode, answers)):
            assert "private" not in text

    async def test_malformed_requests_are_not_logged(self, app: EchoApp, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        async with opened(app, limits=ConnectionLimits(head=HeadLimits(max_bytes=100))) as port:
            for data in (b"nonsense\r\n\r\n", CHUNKED + b"zz\r\n", get(more=b"X: " + b"x" * 200), get("/", CLOSE)):
                await answer_to(port, data)
        assert not [record for record in caplog.records if record.name != "asyncio"]
