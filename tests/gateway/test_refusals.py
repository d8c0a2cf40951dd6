"""Refused requests leave a trace: a count, an id, the replica, and the form of the API's errors."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from photon_grpc.gateway.connections.http_server import HttpServer
from photon_grpc.gateway.connections.limits import ConnectionLimits
from tests.gateway.echo_server import LOCAL, EchoApp, answer_to, connect, get, opened, post, status, to_the_end, until

CLOSE = b"Connection: close\r\n"
EVIL = b"Origin: http://evil.example\r\n"
ID = b"X-Request-Id: mine-7\r\n"


class Counted(list[tuple[str, str, int]]):
    def ended(self, route: str, method: str, status: int, duration_s: float) -> None:
        assert 0 <= duration_s < 60
        self.append((route, method, status))


def headers_of(answer: bytes) -> dict[str, str]:
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


def body_of(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


REFUSED = [
    (get(more=CLOSE + ID).replace(b"localhost", b"evil.example"), "GET", 421),
    (get(more=CLOSE + ID + EVIL), "GET", 403),
    (post(b"x" * 2000, more=ID), "POST", 413),
    (post(b"x", more=ID)[:-1], "POST", 408),
    (get(more=ID + b"X: x\r\n" * 101), "GET", 431),
    (b"DELETE x HTTP/1.1\r\n" + LOCAL + ID + b"\r\n", "DELETE", 400),
]


@pytest.mark.parametrize(("request_bytes", "method", "expected"), REFUSED)
async def test_a_refusal_is_counted_and_named(request_bytes: bytes, method: str, expected: int) -> None:
    counted, limits = Counted(), ConnectionLimits(body_timeout_s=0.05, linger_s=0.05)
    settings = {"counts": counted, "replica_id": "replica-3", "max_body_bytes": 1000, "limits": limits}
    async with opened(EchoApp(), **settings) as port:
        answer = await answer_to(port, request_bytes)
    assert status(answer) == expected
    assert counted == [("refused", method, expected)]
    headers = headers_of(answer)
    assert (headers["x-request-id"], headers["x-photon-replica"]) == ("mine-7", "replica-3")


@pytest.mark.parametrize("sent", [b"", b"X-Request-Id: " + b"x" * 129 + b"\r\n", b"X-Request-Id: \xe4\r\n"])
@pytest.mark.parametrize("more", [EVIL, b"X: x\r\n" * 101])
async def test_a_request_without_a_valid_id_gets_one(sent: bytes, more: bytes) -> None:
    async with opened(EchoApp()) as port:
        headers = [headers_of(await answer_to(port, get(more=CLOSE + sent + more))) for _ in range(2)]
    ids = {each["x-request-id"] for each in headers}
    assert len(ids) == 2 and all(len(bytes.fromhex(each)) == 16 for each in ids)
    assert "x-photon-replica" not in headers[0]


async def test_an_id_belongs_to_one_request_of_a_connection() -> None:
    counted = Counted()
    async with opened(EchoApp(), counts=counted) as port:
        answer = await answer_to(port, get(more=ID) + b"nonsense\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 400") == 1
    assert b"mine-7" not in answer
    assert [status for _, _, status in counted] == [400]


async def test_a_connection_without_a_place_is_counted() -> None:
    counted = Counted()
    limits = ConnectionLimits(max_connections=1)
    app = EchoApp()
    async with opened(app, counts=counted, limits=limits) as port:
        _, writer = await connect(port)
        writer.write(get("/wait"))
        await app.arrived.wait()
        reader, _ = await connect(port)
        answer = await to_the_end(reader)
        writer.close()
    assert status(answer) == 503
    assert counted == [("refused", "", 503)]
    assert len(headers_of(answer)["x-request-id"]) == 32


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens?beta=true"])
async def test_anthropics_clients_get_their_form(path: str) -> None:
    async with opened(EchoApp(), max_body_bytes=1000, limits=ConnectionLimits(linger_s=0.05)) as port:
        answers = [
            await answer_to(port, post(b"x", path, CLOSE + ID + EVIL)),
            await answer_to(port, post(b"x" * 2000, path, ID)),
        ]
    for answer, code in zip(answers, ("ORIGIN_NOT_ALLOWED", "BODY_TOO_LARGE"), strict=True):
        body = body_of(answer)
        message = body["error"].pop("message")
        assert message
        error = {"type": "invalid_request_error", "code": code}
        assert body == {"type": "error", "error": error, "request_id": "mine-7"}
        assert headers_of(answer)["request-id"] == "mine-7"


async def test_a_path_that_only_looks_like_anthropics_gets_openais_form() -> None:
    async with opened(EchoApp()) as port:
        answer = await answer_to(port, get("/v1/messages-of-others", CLOSE + EVIL))
    assert set(body_of(answer)) == {"error"}


async def test_certificates_that_fail_take_no_place_for_good(caplog: pytest.LogCaptureFixture) -> None:
    secret = "a secret"

    class Broken:
        def context(self) -> None:
            raise ValueError(secret)

    certificates: Any = Broken()
    server = HttpServer(EchoApp(), certificates=certificates)
    (address,) = await server.start(["127.0.0.1:0"], reuse_port=False)
    try:
        for _ in range(3):
            assert await answer_to(int(address.rpartition(":")[2]), get()) == b""
        await until(lambda: server.num_connections == 0)
    finally:
        await server.stop(0.0)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 2 and all("ValueError" in text and secret not in text for text in errors)
