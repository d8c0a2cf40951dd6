"""Metrics of the whole service: served by the supervisor (--metrics-listen), or asked for by the HTTP server."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple, Protocol

from photon_grpc.bridge.control import MAX_PAGE_BYTES, Counted, PageAnswer, PageWanted
from photon_grpc.core.frames import Facts
from photon_grpc.service.endpoints.pages import Page, render, text_page


class ServiceState(NamedTuple):
    """The service as its supervisor sees it."""

    is_ready: bool
    #: None while no engine is ready.
    facts: Facts | None
    model: str
    num_frontends: int
    num_engine_restarts: int
    num_frontend_restarts: int


class ServiceMetrics(Protocol):
    async def start(self) -> None:
        """Listen. Raise ConfigError."""

    def received(self, frontend: int, counted: Counted) -> None:
        """Add the counts that a front end reported."""

    def requests_lost(self, num_requests: int) -> None:
        """Count the requests that front ends had when they died."""

    def frontend_ended(self, frontend: int) -> None: ...

    def engine_begins(self, life: int) -> None:
        """Begin the sums of the next engine."""

    def page(self, path: str, accept: str) -> Page:
        """Return one of the pages /metrics, /health, /healthz and /readyz, or one that says which there are."""

    def close(self) -> None: ...


def answer(metrics: ServiceMetrics, wanted: PageWanted) -> PageAnswer:
    """Return the page that a front end asked for; one that says so if it is too long for the control socket."""
    page = metrics.page(wanted.path, wanted.accept)
    if len(page.body) > MAX_PAGE_BYTES:
        problem = f"the page has {len(page.body)} bytes; the limit here is {MAX_PAGE_BYTES}; use --metrics-listen"
        page = text_page(HTTPStatus.INTERNAL_SERVER_ERROR, problem)
    return PageAnswer(wanted.number, int(page.status), page.content_type, page.body)


class NoMetrics:
    async def start(self) -> None:
        """Do nothing."""

    def received(self, frontend: int, counted: Counted) -> None:
        """Do nothing."""

    def requests_lost(self, num_requests: int) -> None:
        """Do nothing."""

    def frontend_ended(self, frontend: int) -> None:
        """Do nothing."""

    def engine_begins(self, life: int) -> None:
        """Do nothing."""

    def page(self, path: str, accept: str) -> Page:
        return render({}, path, accept)

    def close(self) -> None:
        """Do nothing."""
