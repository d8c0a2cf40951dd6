"""The routes of the HTTP server. This file lists them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from photon_grpc.frontend.frontend import Frontend
from photon_grpc.gateway.anthropic.messages import AnthropicMessages
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.errors import HttpError
from photon_grpc.gateway.calls.guard import Endpoint, GuardedEndpoint, HttpRules
from photon_grpc.gateway.engine_feed import EngineFeed
from photon_grpc.gateway.openai.chat import ChatCompletions
from photon_grpc.gateway.openai.completions import Completions
from photon_grpc.gateway.openai.models import Models
from photon_grpc.gateway.openai.responses import Responses
from photon_grpc.gateway.openai.tokens import Tokens
from photon_grpc.gateway.web_page import page_endpoints


class ServicePage(Protocol):
    """A page of the supervisor."""

    @property
    def body(self) -> bytes: ...

    @property
    def content_type(self) -> str: ...

    @property
    def status(self) -> int: ...


class ServicePages(Protocol):
    """Pages of the whole service: /metrics, /health, /healthz and /readyz."""

    async def page(self, path: str, accept: str) -> ServicePage:
        """Return the page for the header `accept`. Raise Unavailable."""


def application(frontend: Frontend, rules: HttpRules, pages: ServicePages, *, max_body_bytes: int) -> ASGIApp:
    """Return the ASGI application of the server."""
    endpoints = [
        *Completions(frontend, max_body_bytes).endpoints(),
        *ChatCompletions(frontend, max_body_bytes).endpoints(),
        *Responses(frontend, max_body_bytes).endpoints(),
        *Models(frontend).endpoints(),
        *Tokens(frontend, max_body_bytes).endpoints(),
        *EngineFeed(frontend).endpoints(),
        *page_endpoints(),
        *AnthropicMessages(frontend, max_body_bytes).endpoints(),
        *_supervisor(pages),
    ]
    # Endpoints check the method themselves, to answer in the form of their API.
    routes = [Route(endpoint.route, GuardedEndpoint(endpoint, rules)) for endpoint in endpoints]
    unknown = GuardedEndpoint(Endpoint("unknown", _unknown, _METHODS, reads_json=False), rules)
    return Router(routes, redirect_slashes=False, default=unknown)


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def _unknown(call: HttpCall) -> Response:
    raise HttpError(HTTPStatus.NOT_FOUND, "there is no such path; docs/http.md lists them")


def _supervisor(pages: ServicePages) -> list[Endpoint]:
    async def answer(call: HttpCall) -> Response:
        page = await pages.page(call.route, call.headers.get("accept", ""))
        return Response(page.body, page.status, {"content-type": page.content_type})

    get = ("GET", "HEAD")
    probes = [Endpoint(path, answer, get, exemption="health") for path in ("/health", "/healthz", "/readyz")]
    return [*probes, Endpoint("/metrics", answer, get, ("admin",))]
