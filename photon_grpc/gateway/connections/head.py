"""The head of a request, checked as a whole before the HTTP parser sees it.

Parsers of two programs on the way of a request must agree where it ends, else one caller's bytes become another's
request. So everything that programs read differently is refused: bare CR or LF, folded lines, two lengths, lists of
lengths, spaces before a colon, other transfer encodings than chunked, and targets that are no path.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from photon_grpc.gateway.connections.refusal import HttpRefusal

#: One header line; its names are RFC 9110's tokens.
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([\t\x20-\x7e\x80-\xff]*)\r\n")
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/1\.([01])\r\n")
_BARE_NEWLINE = re.compile(rb"(?<!\r)\n")
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
_HTTP_2 = b"PRI * HTTP/2.0\r\n"
_END = b"\r\n\r\n"
#: A length with more digits is no length of a body.
_MAX_DIGITS = 19


class HeadLimits(NamedTuple):
    """The size of a head."""

    max_bytes: int = 16 * 1024
    max_line_bytes: int = 8 * 1024
    max_headers: int = 100


class RequestHead(NamedTuple):
    """A head that is well formed."""

    #: As it goes to the parser.
    raw: bytes
    #: The bytes of the body; None if it is chunked.
    content_length: int | None


def find_end(received: bytearray, searched: int, limits: HeadLimits) -> int:
    """Return where the head ends, or -1 if it has not arrived whole. Raise HttpRefusal as soon as it cannot become one.

    The first `searched` bytes have been looked at before.
    """
    end = received.find(_END, max(0, searched - len(_END) + 1))
    size = len(received) if end < 0 else end + len(_END)
    _check_line(received, searched, limits)
    if size > limits.max_bytes:
        raise HttpRefusal(431, "HEAD_TOO_LARGE", f"the headers have more than {limits.max_bytes} bytes; send fewer")
    if _BARE_NEWLINE.search(received, max(0, searched - 1), size):
        raise _malformed("a line ends without CR")
    return size if end >= 0 else -1


def _check_line(received: bytearray, searched: int, limits: HeadLimits) -> None:
    """Raise HttpRefusal if the request line, or what has arrived of it, is too long or none of HTTP/1.1."""
    end = received.find(b"\r\n", 0, limits.max_line_bytes + 2)
    if end < 0 and len(received) > limits.max_line_bytes:
        text = f"the request line has more than {limits.max_line_bytes} bytes; shorten the URL"
        raise HttpRefusal(414, "URL_TOO_LONG", text)
    if received.startswith(_HTTP_2) or not received[:1].isalpha():
        text = (
            "this port speaks HTTP/1.1; gRPC and HTTP/2 have a port of their own (--listen), and TLS needs --tls-cert"
        )
        raise HttpRefusal(400, "NOT_HTTP_1", text)
    if end + 2 > searched and end >= 0 and not _REQUEST_LINE.match(received):
        raise _malformed("the first line is not METHOD /PATH HTTP/1.1")


def parse_head(raw: bytes, limits: HeadLimits) -> RequestHead:
    """Return the head. Raise HttpRefusal if it is malformed or asks for what the server does not do."""
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise _malformed("the first line is not METHOD /PATH HTTP/1.1")
    _check_target(line[1], line[2])
    headers = _headers(raw, line.end(), limits)
    _check_connection(headers)
    length = _content_length(headers, line[3])
    return RequestHead(_without_upgrade(raw) if b"upgrade" in headers else raw, length)


def _check_target(method: bytes, target: bytes) -> None:
    if method not in _METHODS:
        raise HttpRefusal(405, "METHOD_NOT_ALLOWED", "there is no such method here", [(b"allow", b"GET, POST")])
    if not target.startswith(b"/"):
        raise _malformed("the target is not a path that begins with /; this is not a proxy")
    if b"#" in target or _BAD_ESCAPE.search(target):
        raise _malformed("the path has a # or a % without two hexadecimal digits")


def _headers(raw: bytes, start: int, limits: HeadLimits) -> dict[bytes, list[bytes]]:
    """Return the values by lower-case name."""
    found: dict[bytes, list[bytes]] = {}
    count, end = 0, len(raw) - 2
    while start < end:
        line = _HEADER.match(raw, start)
        if line is None:
            raise _malformed("a header line is not NAME: VALUE on one line, without control characters")
        count += 1
        found.setdefault(line[1].lower(), []).append(line[2].strip(b" \t"))
        start = line.end()
    if count > limits.max_headers:
        text = f"there are {count} headers; the limit is {limits.max_headers}"
        raise HttpRefusal(431, "HEAD_TOO_LARGE", text)
    return found


def _check_connection(headers: dict[bytes, list[bytes]]) -> None:
    if len(headers.get(b"host", ())) != 1:
        raise _malformed("there is not exactly one Host header")
    if any(b"websocket" in value.lower() for value in headers.get(b"upgrade", ())):
        raise HttpRefusal(400, "NO_WEBSOCKETS", "there are no WebSockets here; streams are server-sent events")
    if any(value.lower() != b"100-continue" for value in headers.get(b"expect", ())):
        raise HttpRefusal(417, "EXPECTATION_FAILED", "only Expect: 100-continue is understood")


def _content_length(headers: dict[bytes, list[bytes]], minor: bytes) -> int | None:
    """Return the length of the body; None if it is chunked."""
    lengths, encodings = headers.get(b"content-length", []), headers.get(b"transfer-encoding", [])
    if len(lengths) + len(encodings) > 1:
        raise _malformed("more than one header says how long the body is")
    if encodings:
        if encodings[0].lower() != b"chunked" or minor == b"0":
            raise _malformed("a body may be sent with Content-Length or, in HTTP/1.1, Transfer-Encoding: chunked")
        return None
    if not lengths:
        return 0
    if not lengths[0].isdigit():
        raise _malformed("Content-Length is not a number")
    if len(lengths[0]) > _MAX_DIGITS:
        raise HttpRefusal(413, "BODY_TOO_LARGE", f"Content-Length has more than {_MAX_DIGITS} digits")
    return int(lengths[0])


def _without_upgrade(raw: bytes) -> bytes:
    """Return the head without Upgrade, which a server may ignore: HTTP clients of Java offer h2c with every request.

    The parser would take the body for the other protocol.
    """
    lines = raw.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"upgrade:"))


def _malformed(problem: str) -> HttpRefusal:
    return HttpRefusal(400, "MALFORMED_REQUEST", f"this is not a valid HTTP/1.1 request: {problem}")
