"""A request that the door refuses before the app sees it, in the form of OpenAI's errors."""

from __future__ import annotations

import http
import json
from collections.abc import Iterable

from photon_grpc.errors import PhotonError

Headers = list[tuple[bytes, bytes]]


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

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    def headers(self) -> Headers:
        """Return the headers of the answer. The connection ends with it, since the body may not have been read."""
        return [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body())).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            *self._headers,
        ]

    def response(self, default_headers: Headers) -> bytes:
        """Return the whole response, after which the connection is closed."""
        phrase = http.HTTPStatus(self.status).phrase
        headers = [*default_headers, *self.headers(), (b"connection", b"close")]
        lines = [f"HTTP/1.1 {self.status} {phrase}".encode(), *(name + b": " + value for name, value in headers)]
        return b"\r\n".join([*lines, b"", self.body()])
