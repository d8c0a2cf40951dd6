"""The routes of the HTTP door. This file lists them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from photon_grpc.frontend.frontend import Frontend
from photon_grpc.gateway.call import HttpCall
from photon_grpc.gateway.errors import HttpError
from photon_grpc.gateway.guard import Endpoint, Guard, HttpRules
from photon_grpc.gateway.openai.chat import ChatCompletions
from photon_grpc.gateway.openai.completions import Completions
from photon_grpc.gateway.openai.models import Models
from photon_grpc.gateway.openai.tokens import Tokens


class Page(Protocol):
    """A page of the supervisor."""

    @property
    def body(self) -> bytes: ...

    @property
    def content_type(self) -> str: ...

    @property
    def status(self) -> int: ...


class Pages(Protocol):
    """Pages of the whole service: /metrics, /health, /healthz and /readyz."""

    async def page(self, path: str, accept: str) -> Page:
        """Return the page for the header `accept`. Raise Unavailable."""


def application(frontend: Frontend, rules: HttpRules, pages: Pages, *, max_body_bytes: int) -> ASGIApp:
    """Return the ASGI application of the door."""
    guard = Guard(rules)
    endpoints = [
        *Completions(frontend, max_body_bytes).endpoints(),
        *ChatCompletions(frontend, max_body_bytes).endpoints(),
        *Models(frontend).endpoints(),
        *Tokens(frontend, max_body_bytes).endpoints(),
        *_supervisor(pages),
    ]
    # Endpoints check the method themselves, to answer in the form of their API.
    routes = [Route(endpoint.route, guard.guarded(endpoint)) for endpoint in endpoints]
    return Router(routes, redirect_slashes=False, default=guard.guarded(Endpoint("unknown", _unknown, _METHODS)))


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def _unknown(call: HttpCall) -> Response:
    raise HttpError(HTTPStatus.NOT_FOUND, "there is no such path; docs/http.md lists them")


def _supervisor(pages: Pages) -> list[Endpoint]:
    async def answer(call: HttpCall) -> Response:
        page = await pages.page(call.request.url.path, call.headers.get("accept", ""))
        return Response(page.body, page.status, {"content-type": page.content_type})

    get = ("GET", "HEAD")
    probes = [Endpoint(path, answer, get, exemption="health") for path in ("/health", "/healthz", "/readyz")]
    return [*probes, Endpoint("/metrics", answer, get, ("admin",))]
