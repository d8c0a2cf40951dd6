"""The application of the HTTP server in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.errors import Unavailable
from photon_grpc.gateway.app import application
from photon_grpc.gateway.calls.guard import HttpRules, NoHttpCounts
from photon_grpc.observe.failure_log import FailureLog


class ShownPage(NamedTuple):
    body: bytes
    content_type: str
    status: int


class FakePages:
    """A supervisor that serves the pages in `shown`."""

    def __init__(self) -> None:
        self.shown: dict[str, ShownPage] = {"/health": ShownPage(b"SERVING\n", "text/plain; charset=utf-8", 200)}

    async def page(self, path: str, accept: str) -> ShownPage:
        if path not in self.shown:
            raise Unavailable("the supervisor does not answer")
        return self.shown[path]


class HttpCountsKept(NoHttpCounts):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.fields: list[str] = []

    def ended(self, route: str, method: str, status: int, duration_s: float) -> None:
        self.calls.append((route, method, status))

    def ignored(self, field: str) -> None:
        self.fields.append(field)


class InMemory(NamedTuple):
    client: httpx.AsyncClient
    counts: HttpCountsKept
    pages: FakePages


def in_memory(frontend: Any, *, keys: KeyRing | None = None, exempt: tuple[str, ...] = ("health",)) -> InMemory:
    """Return a client whose calls reach the application without a connection. Streams arrive whole."""
    counts, pages = HttpCountsKept(), FakePages()
    rules = HttpRules(FailureLog(), "replica-1", keys, exempt, counts, lambda: frontend.numerics_version)
    app = application(frontend, rules, pages, max_body_bytes=1 << 20)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    return InMemory(httpx.AsyncClient(transport=transport, base_url="http://localhost"), counts, pages)
