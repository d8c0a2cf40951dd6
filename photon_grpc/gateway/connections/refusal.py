"""A request that the server refuses before the app sees it: its answer in the form of the API, and its count."""

from __future__ import annotations

import http
import json
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any, Protocol

from photon_grpc.core.admission import check_request_id
from photon_grpc.errors import InvalidRequest, PhotonError

Headers = list[tuple[bytes, bytes]]
#: What metrics have for the route of a refused request.
_ROUTE = "refused"
_ANTHROPIC_PATH = re.compile(r"/v1/messages(/|$)")
_REQUEST_ID = b"x-request-id"
_HEADER_LINE = re.compile(rb"\r\n([^:\r\n]+):([^\r\n]*)")


class RefusalCounts(Protocol):
    """A counter of calls by route."""

    def ended(self, route: str, method: str, status: int, duration_s: float) -> None: ...


class NoRefusalCounts:
    """A counter that counts nothing."""

    def ended(self, route: str, method: str, status: int, duration_s: float) -> None:
        pass


class PartialRequest:
    """A request as far as it has arrived: what its refusal needs."""

    def __init__(self, method: str = "", path: str = "", headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Take the request's id from the headers, or draw one."""
        self.method = method
        self.is_anthropic = _ANTHROPIC_PATH.match(path) is not None
        self.request_id = _request_id(headers) or secrets.token_hex(16)
        self.started_s = time.monotonic()

    @classmethod
    def of_head(cls, raw: bytes, started_s: float) -> PartialRequest:
        """Read a whole head, which may be malformed."""
        method, _, rest = raw.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        headers = [(match[1].lower(), match[2].strip(b" \t")) for match in _HEADER_LINE.finditer(raw)]
        asked = cls(method, re.split("[? ]", rest, maxsplit=1)[0], headers)
        asked.started_s = started_s
        return asked


class HttpRefusal(Exception):
    """A refused request. `message` says what is wrong and what to do, and quotes nothing that the caller wrote."""

    def __init__(self, status: int, code: str, message: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self._headers = headers

    @classmethod
    def of(cls, error: PhotonError) -> HttpRefusal:
        """Return the refusal for a lack of places or memory."""
        return cls(503, error.reason, f"{error.message}; try again later", [(b"retry-after", b"1")])

    def body(self, asked: PartialRequest) -> bytes:
        """Return the body in the form of the API's errors."""
        error: dict[str, Any] = {"message": self.message, "code": self.code}
        whole: dict[str, Any]
        if asked.is_anthropic:
            kind = "invalid_request_error" if self.status < 500 else "api_error"
            whole = {"type": "error", "error": {"type": kind, **error}, "request_id": asked.request_id}
        else:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
            whole = {"error": {"type": kind, "param": None, **error}}
        return json.dumps(whole, ensure_ascii=False).encode()

    def headers(self, asked: PartialRequest) -> Headers:
        """Return the headers of the answer."""
        request_id = asked.request_id.encode()
        return [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body(asked))).encode()),
            (_REQUEST_ID, request_id),
            *([(b"request-id", request_id)] if asked.is_anthropic else []),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            *self._headers,
        ]


class Refusals:
    """Answers the refused requests of a server, and counts them."""

    def __init__(self, counts: RefusalCounts | None = None, replica_id: str = "") -> None:
        """Take the counter, and the value of x-photon-replica, which is left out if empty."""
        self._counts = NoRefusalCounts() if counts is None else counts
        self._replica: Headers = [(b"x-photon-replica", replica_id.encode())] if replica_id else []

    def answer(self, refusal: HttpRefusal, asked: PartialRequest) -> tuple[Headers, bytes]:
        """Count the refusal; return the headers and the body of its answer."""
        self._counts.ended(_ROUTE, asked.method, refusal.status, time.monotonic() - asked.started_s)
        return [*refusal.headers(asked), *self._replica], refusal.body(asked)

    def response(self, refusal: HttpRefusal, asked: PartialRequest, default_headers: Headers) -> bytes:
        """Count the refusal; return its whole response, after which the connection is closed."""
        phrase = http.HTTPStatus(refusal.status).phrase
        refused, body = self.answer(refusal, asked)
        # The body of the request may not have been read.
        headers = [*default_headers, *refused, (b"connection", b"close")]
        lines = [f"HTTP/1.1 {refusal.status} {phrase}".encode(), *(name + b": " + value for name, value in headers)]
        return b"\r\n".join([*lines, b"", body])


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the caller's id for the request; empty if there is none or it is not valid."""
    found = next((value.decode("latin-1") for name, value in headers if name == _REQUEST_ID), "")
    try:
        check_request_id(found)
    except InvalidRequest:
        return ""
    return found
