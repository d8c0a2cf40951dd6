"""Random changes to valid requests, held against h11, a parser that shares no code with the server's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

import h11
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.gateway.echo_server import JSON, LOCAL, EchoApp, Seen, answer_to, get, opened, post

CHUNKED = (
    b"POST /c HTTP/1.1\r\n"
    + LOCAL
    + JSON
    + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
)
REQUESTS = (get("/a?b=c"), post(b"[1, 2]", "/b"), CHUNKED, get("/d", b"X: y\r\nConnection: keep-alive\r\n"))
#: What changes the meaning of a request to somebody.
PIECES = (
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b";", b",", b"%", b"#", b"/", b"0", b"9", b"\xff"),
    *(b"Content-Length: 3\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"chunked", b"identity"),
    *(
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"Connection: close\r\n",
        b"Upgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"Host: a\r\n",
    ),
    *(b"http://localhost", b"GET ", b"CONNECT ", b"0\r\n\r\n", b"ffffffff\r\n", *REQUESTS),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Draw up to three requests with a few changes."""
    data = b"".join(draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from((0, 0, 1, 2, 10))))
        data = data[:start] + draw(st.sampled_from((b"", *PIECES)) | st.binary(min_size=1, max_size=3)) + data[end:]
    return data


def as_h11_reads(data: bytes) -> list[tuple[str, str, bytes]]:
    """Return the requests (method, target, body) up to the first that h11 finds malformed or incomplete."""
    found: list[tuple[str, str, bytes]] = []
    with contextlib.suppress(h11.ProtocolError):
        while data:
            parser = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
            parser.receive_data(re.sub(rb"\A(\r\n)+", b"", data))  # which h11 does not skip
            parser.receive_data(b"")
            request = parser.next_event()
            if not isinstance(request, h11.Request):
                break
            body = b""
            while isinstance(piece := parser.next_event(), h11.Data):
                body += piece.data
            found.append((request.method.decode(), request.target.decode("latin-1"), body))
            data = parser.trailing_data[0]
    return found


def check_answers(answer: bytes) -> int:
    """Return how many requests were answered with 200. There are whole answers, at most one of them an error."""
    statuses = []
    client = h11.Connection(h11.CLIENT)
    client.receive_data(answer)
    client.receive_data(b"")
    while client.trailing_data[0]:
        client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
        client.send(h11.EndOfMessage())
        while isinstance(response := client.next_event(), h11.InformationalResponse):
            pass
        assert isinstance(response, h11.Response)
        statuses.append(response.status_code)
        while not isinstance(client.next_event(), h11.EndOfMessage):
            pass
        if client.their_state is not h11.DONE:
            break
        client.start_next_cycle()
    assert all(status == 200 or 400 <= status < 500 for status in statuses)
    return statuses.count(200)


async def _answers(many: Sequence[bytes]) -> list[tuple[list[Seen], bytes]]:
    found = []
    for data in many:
        app = EchoApp()
        async with opened(app) as port:
            found.append((app.seen, await answer_to(port, data, half_close=True)))
            assert (await answer_to(port, get("/after", b"Connection: close\r\n"))).startswith(b"HTTP/1.1 200")
            app.seen.pop()
    return found


def check(data: bytes) -> None:
    ((seen, answer),) = uvloop.run(_answers([data]))
    num_answered = check_answers(answer)
    assert num_answered <= len(seen)
    whole = [request for request in seen if not request.was_told]
    # The policy answers some of them itself.
    left = iter(as_h11_reads(data))
    for request in whole:
        assert any(is_same(request, other) for other in left), request


def is_same(request: Seen, other: tuple[str, str, bytes]) -> bool:
    method, target, body = other
    path, _, query = target.partition("?")
    found = (request.method, request.query, request.body)
    return found == (method, query.encode("latin-1"), body) and (request.path == path or "%" in path)


@settings(max_examples=examples(150))
@given(mutated())
def test_what_reaches_the_app_is_what_another_parser_reads(data: bytes) -> None:
    check(data)


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        (REQUESTS[0] + REQUESTS[1] + REQUESTS[3], ["/a", "/b", "/d"]),
        # What follows a chunked body is left unread, and the connection closed.
        (REQUESTS[1] + CHUNKED + REQUESTS[0], ["/b", "/c"]),
    ],
)
def test_valid_requests_are_answered(data: bytes, paths: list[str]) -> None:
    ((seen, answer),) = uvloop.run(_answers([data]))
    assert [request.path for request in seen] == paths
    assert check_answers(answer) == len(paths)
