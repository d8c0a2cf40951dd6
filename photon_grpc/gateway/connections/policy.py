"""The rules for callers: Host, Origin, and no keys in URLs.

A service on localhost without keys is open to every web page in a browser on the same machine. A page may send a POST
across origins, and may have its own name resolve to 127.0.0.1. So the server answers only to names that it was given,
and only its own pages and those of --http-allowed-origin. `calls/guard.py` refuses bodies that a page may send without
asking first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl

from photon_grpc.gateway.connections.refusal import Headers, HttpRefusal, PartialRequest, Refusals

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = frozenset({"0.0.0.0", "::"})
_KEY_NAMES = frozenset({"api_key", "apikey", "api-key", "key", "token", "access_token", "authorization"})
_METHODS = b"GET, HEAD, POST, OPTIONS"
_MAX_AGE_S = b"600"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_ALWAYS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_MAX_QUERY_FIELDS = 100
_VARY = (b"vary", b"Origin")
_EXPOSED = ((b"access-control-expose-headers", b"retry-after, x-photon-numerics, x-request-id"),)
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_HOST = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(:\d{1,5})?", re.ASCII)
#: Names of headers that a page wants to send.
_NAMES = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z, ]{0,2000}")


class HttpPolicy:
    """An ASGI app around another. It answers what is not allowed."""

    def __init__(
        self,
        app: Any,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        refusals: Refusals | None = None,
    ) -> None:
        """Take the names that the server answers to besides its addresses, and the origins of foreign pages."""
        self._app = app
        self._refusals = Refusals() if refusals is None else refusals
        self._allowed_hosts = frozenset(_allowed(host.lower()) for host in allowed_hosts)
        self._allowed_origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)
        self._hosts = _LOCAL_HOSTS
        self._is_wildcard = False

    def listen(self, addresses: Sequence[str]) -> None:
        """Answer to the hosts of these addresses, and for a wildcard to every IP address: names are what is rebound.

        Any port is right, since a port may be forwarded.
        """
        hosts = {_host(address.lower()) for address in addresses}
        self._hosts = _LOCAL_HOSTS | hosts
        self._is_wildcard = not _WILDCARDS.isdisjoint(hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"an ASGI scope of type {scope['type']}")
        call = _CallHead(scope)
        cors: Headers = []
        try:
            self._check_host(call)
            cors = self._cors(call)
            self._check_site(call)
            if call.is_preflight and len(cors) > 1:
                await _answer(send, 204, b"", [*cors, *_preflight(call)])
                return
            _check_query(call)
        except HttpRefusal as refusal:
            asked = PartialRequest(scope["method"], scope["path"], scope["headers"])
            headers, body = self._refusals.answer(refusal, asked)
            await _answer(send, refusal.status, body, [*headers, *cors])
            return
        await self._app(scope, receive, _with_headers(send, cors))

    def _check_host(self, call: _CallHead) -> None:
        if not self._is_ours(call.one(b"host") or ""):
            text = "this server does not answer to the name in the Host header; start it with --http-allowed-host NAME"
            raise HttpRefusal(421, "HOST_NOT_ALLOWED", text)

    def _is_ours(self, header: str) -> bool:
        try:
            host = _host(header)
        except ValueError:
            return False
        if header in self._allowed_hosts or host in self._allowed_hosts or host in self._hosts:
            return True
        return self._is_wildcard and _is_ip(host)

    def _cors(self, call: _CallHead) -> Headers:
        """Return the headers with which a page of an allowed origin may read the answer."""
        if not self._allowed_origins:
            return []
        origin = call.one(b"origin")
        if origin not in self._allowed_origins:
            return [_VARY]
        return [(b"access-control-allow-origin", origin.encode("latin-1")), *_EXPOSED, _VARY]

    def _check_site(self, call: _CallHead) -> None:
        """Refuse what a foreign page sends. Only browsers send these headers, and pages cannot change them."""
        origins = call.all(b"origin")
        if len(origins) == 1 and (origins[0] in self._allowed_origins or origins[0] == call.own_origin()):
            return
        if origins:
            text = "pages of that origin may not call this server; start it with --http-allowed-origin ORIGIN"
            raise HttpRefusal(403, "ORIGIN_NOT_ALLOWED", text)
        if not _FOREIGN_SITES.isdisjoint(call.all(b"sec-fetch-site")) and not call.is_navigation:
            text = "pages of other origins may not call this server; see --http-allowed-origin"
            raise HttpRefusal(403, "ORIGIN_NOT_ALLOWED", text)


class _CallHead:
    """The head of a request."""

    def __init__(self, scope: Any) -> None:
        self.method: str = scope["method"]
        self.query: bytes = scope["query_string"]
        self._scheme: str = scope["scheme"]
        self._headers: Headers = scope["headers"]

    def all(self, name: bytes) -> list[str]:
        return [value.decode("latin-1").lower() for key, value in self._headers if key == name]

    def one(self, name: bytes) -> str | None:
        """Return the header's value; None if there is no such header or more than one."""
        values = self.all(name)
        return values[0] if len(values) == 1 else None

    @property
    def is_preflight(self) -> bool:
        return self.method == "OPTIONS" and self.one(b"access-control-request-method") is not None

    @property
    def is_navigation(self) -> bool:
        """Return whether a user follows a link to the page."""
        is_top = self.one(b"sec-fetch-dest") in (None, "document")
        return self.method == "GET" and self.one(b"sec-fetch-mode") == "navigate" and is_top

    def own_origin(self) -> str:
        """Return the origin of a page that was fetched under this request's Host."""
        host = self.one(b"host") or ""
        return f"{self._scheme}://{host.removesuffix(f':{_DEFAULT_PORTS[self._scheme]}')}"


def _check_query(call: _CallHead) -> None:
    try:
        fields = parse_qsl(call.query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError:
        text = f"the URL has more than {_MAX_QUERY_FIELDS} query parameters"
        raise HttpRefusal(400, "INVALID_REQUEST", text) from None
    if any(name.lower() in _KEY_NAMES for name, _ in fields):
        text = (
            "a key in a URL ends up in logs and histories; send it as Authorization: Bearer KEY, and replace this one"
        )
        raise HttpRefusal(400, "KEY_IN_URL", text)


def _preflight(call: _CallHead) -> Headers:
    names = call.one(b"access-control-request-headers") or ""
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", names.encode("latin-1") if _NAMES.fullmatch(names) else b""),
        (b"access-control-max-age", _MAX_AGE_S),
    ]


def _with_headers(send: Any, cors: Headers) -> Any:
    """Return `send` with the headers that every answer has unless the app sets them."""

    def wrapped(message: Any) -> Any:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in headers}
            message = message | {"headers": headers + [pair for pair in _ALWAYS if pair[0] not in names] + cors}
        return send(message)

    return wrapped


async def _answer(send: Any, status: int, body: bytes, headers: Headers) -> None:
    await _with_headers(send, [])({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _host(text: str) -> str:
    """Return the host of HOST or HOST:PORT, without brackets. Raise ValueError."""
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError("no host")
    return match["host"].removeprefix("[").removesuffix("]")


def _allowed(setting: str) -> str:
    """Return the host of an allowed HOST, or HOST:PORT as it is: that one is right at this port only."""
    match = _HOST.fullmatch(setting)
    return setting if match is None or match[2] else _host(setting)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
