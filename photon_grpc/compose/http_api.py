"""The HTTP server of a front end, if it has one. Nothing else imports `gateway`, and nothing without --http-listen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from photon_grpc.observe.metrics import HttpMetrics

if TYPE_CHECKING:
    from photon_grpc.compose.access import Access
    from photon_grpc.compose.observation import Observability
    from photon_grpc.config.flags import ServerConfig
    from photon_grpc.frontend.frontend import Frontend
    from photon_grpc.gateway.app import ServicePages
    from photon_grpc.server.services.answering import OtherServices


class HttpApi(Protocol):
    async def start(self, addresses: Sequence[str], *, reuse_port: bool) -> tuple[str, ...]:
        """Listen; return the bound addresses. Raise ConfigError."""

    def draining(self) -> None:
        """Close each connection after its answer from now on; the port stays open."""

    async def stop(self, timeout_s: float) -> None:
        """Stop listening; running answers have `timeout_s` to end."""


class NoHttpApi:
    async def start(self, addresses: Sequence[str], *, reuse_port: bool) -> tuple[str, ...]:
        return ()

    def draining(self) -> None:
        """Do nothing."""

    async def stop(self, timeout_s: float) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class ServedParts:
    """The parts of a front end that answer calls, and the rules for its callers."""

    frontend: Frontend
    config: ServerConfig
    allowed: Access
    observed: Observability
    replica_id: str
    pages: ServicePages
    services: OtherServices


def http_api(addresses: Sequence[str], parts: ServedParts) -> HttpApi:
    """Return the HTTP server for these addresses; without any, one that never listens."""
    if not addresses:
        return NoHttpApi()
    # Part of an extra, which may not be installed; importing it takes a fifth of a second.
    from photon_grpc.gateway.app import application
    from photon_grpc.gateway.calls.guard import HttpRules, NoHttpCounts
    from photon_grpc.gateway.connections.http_server import HttpServer
    from photon_grpc.gateway.connections.tls import HttpCertificates

    config = parts.config
    tls = (config.tls_cert, config.tls_key, config.tls_client_ca)
    http_counts = HttpMetrics(counts) if (counts := parts.observed.counts) else NoHttpCounts()
    rules = HttpRules(
        parts.observed.failures,
        parts.replica_id,
        parts.allowed.ring,
        config.api_keys_exempt,
        http_counts,
        lambda: parts.frontend.numerics_version,
    )
    app = application(parts.frontend, rules, parts.pages, max_body_bytes=config.max_message_size)
    return HttpServer(
        app,
        certificates=HttpCertificates(*tls) if config.tls_cert else None,
        allowed_hosts=config.http_allowed_host,
        allowed_origins=config.http_allowed_origin,
        max_body_bytes=config.max_message_size,
        counts=http_counts,
        replica_id=parts.replica_id,
    )
