"""Heads of requests: what is refused, and how much of one."""

from __future__ import annotations

import pytest

from photon_grpc.gateway.connections.head import HeadLimits, find_end, parse_head
from photon_grpc.gateway.connections.refusal import HttpRefusal
from tests.gateway.echo_server import JSON, LOCAL

LIMITS = HeadLimits()
START = b"POST /v1/x HTTP/1.1\r\n" + LOCAL


def parsed(data: bytes, limits: HeadLimits = LIMITS) -> int | None:
    """Return the length of the body of a request whose head arrives at once."""
    end = find_end(bytearray(data), 0, limits)
    assert end == len(data)
    return parse_head(data, limits).content_length


def refused(data: bytes, limits: HeadLimits = LIMITS) -> int:
    """Return the status for a head; it must be the same if the head arrives byte by byte."""
    with pytest.raises(HttpRefusal) as at_once:
        parsed(data, limits)
    with pytest.raises(HttpRefusal) as by_bytes:
        for size in range(1, len(data) + 1):
            end = find_end(bytearray(data[:size]), size - 1, limits)
            if end >= 0:
                parse_head(data[:end], limits)
    assert by_bytes.value.status == at_once.value.status
    return at_once.value.status


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        (b"", 0),
        (b"Content-Length: 0\r\n", 0),
        (b"Content-Length: 17\r\n", 17),
        (b"content-length:17  \r\n", 17),
        (b"Transfer-Encoding: Chunked\r\n", None),
        (b"Expect: 100-Continue\r\nContent-Length: 17\r\n", 17),
        (b"X-Empty:\r\nX-Latin: \xe9\r\nX_Under-Score.1: a:b\r\n", 0),
    ],
)
def test_a_head_says_how_long_its_body_is(headers: bytes, length: int | None) -> None:
    assert parsed(START + headers + b"\r\n") == length


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: 5_0\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: \xb2\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b" Transfer-Encoding: chunked\r\n",
        b"X: a\r\n Transfer-Encoding: chunked\r\n",
        b"X: a\r\n\tfolded\r\n",
        b"X: a\nTransfer-Encoding: chunked\r\n",
        b"X: a\rTransfer-Encoding: chunked\r\n",
        b"X: a\x00b\r\n",
        b"X\x00: a\r\n",
        b"X\xe9: a\r\n",
        b"X: a\x7f\r\n",
        b"no colon\r\n",
        b"Host: other\r\n",
        b": no name\r\n",
        b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    ],
)
def test_headers_that_programs_read_differently_are_refused(headers: bytes) -> None:
    assert refused(START + headers + b"\r\n") == 400


def test_a_length_that_no_body_has_is_too_large() -> None:
    assert refused(START + b"Content-Length: 99999999999999999999\r\n\r\n") == 413


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"GET http://localhost/ HTTP/1.1\r\n", 400),
        (b"GET localhost:80 HTTP/1.1\r\n", 400),
        (b"GET * HTTP/1.1\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\n", 400),
        (b"CONNECT localhost:22 HTTP/1.1\r\n", 405),
        (b"TRACE / HTTP/1.1\r\n", 405),
        (b"BREW / HTTP/1.1\r\n", 405),
        (b"get / HTTP/1.1\r\n", 400),
        (b"GET /\r\n", 400),
        (b"GET / HTTP/0.9\r\n", 400),
        (b"GET / HTTP/1.2\r\n", 400),
        (b"GET / HTTP/2.0\r\n", 400),
        (b"GET / HTTP/1.1 \r\n", 400),
        (b"GET  / HTTP/1.1\r\n", 400),
        (b"GET\t/ HTTP/1.1\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\n", 400),
        (b"GET /#part HTTP/1.1\r\n", 400),
        (b"GET /%zz HTTP/1.1\r\n", 400),
        (b"GET /% HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\n", 400),
        (b"PRI * HTTP/2.0\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n", 400),
    ],
)
def test_first_lines_that_are_no_request_for_a_path_are_refused(line: bytes, expected: int) -> None:
    assert refused(line + LOCAL + b"\r\n") == expected


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\nHost: localhost\n\n", b"GET / HTTP/1.1\r\nHost: localhost\n\n"])
def test_a_head_that_will_never_end_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(HttpRefusal, match="without CR"):
        find_end(bytearray(data), 0, LIMITS)


def test_there_must_be_a_host() -> None:
    assert refused(b"GET / HTTP/1.1\r\nAccept: */*\r\n\r\n") == 400


def test_a_client_of_grpc_is_told_that_this_is_another_port() -> None:
    with pytest.raises(HttpRefusal, match="gRPC") as refusal:
        find_end(bytearray(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 0, LIMITS)
    assert refusal.value.code == "NOT_HTTP_1"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [(b"Expect: 200-ok\r\n", 417), (b"Expect: 100-continue, 200-ok\r\n", 417)],
)
def test_other_expectations_fail(headers: bytes, expected: int) -> None:
    assert refused(START + headers + b"\r\n") == expected


def test_heads_up_to_their_limits_are_read_and_larger_ones_refused() -> None:
    limits = HeadLimits(max_bytes=200, max_line_bytes=60, max_headers=5)
    start = b"GET / HTTP/1.1\r\n" + LOCAL
    assert parsed(start + b"A: " + b"a" * (200 - len(start) - 7) + b"\r\n\r\n", limits) == 0
    assert refused(start + b"A: " + b"a" * (200 - len(start) - 6) + b"\r\n\r\n", limits) == 431
    assert parsed(b"GET /" + b"a" * 46 + b" HTTP/1.1\r\n" + LOCAL + b"\r\n", limits) == 0
    assert refused(b"GET /" + b"a" * 47 + b" HTTP/1.1\r\n" + LOCAL + b"\r\n", limits) == 414
    assert parsed(start + b"A:\r\n" * 4 + b"\r\n", limits) == 0
    assert refused(start + b"A:\r\n" * 5 + b"\r\n", limits) == 431


def test_an_offer_of_http_2_is_ignored_with_its_header() -> None:
    """The HTTP client of Java makes it with every request, and takes HTTP/1.1 for an answer."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = parse_head(START + offer + JSON + b"\r\n", LIMITS)
    assert b"h2c" not in head.raw
    assert JSON in head.raw
