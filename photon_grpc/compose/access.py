"""Access to a front end and its limits, chosen once by the configuration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.quotas import Quotas
from photon_grpc.frontend.quotas import NO_FRONTEND_QUOTAS, FrontendQuotas, NoFrontendQuotas
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import NO_KEYS, KeyCheck
from photon_grpc.server.tls import Certificates


@dataclass(frozen=True, slots=True)
class Access:
    """API keys, quotas and certificates; without keys all calls are allowed, without certificates in clear text."""

    keys: KeyCheck = NO_KEYS
    quotas: FrontendQuotas | NoFrontendQuotas = NO_FRONTEND_QUOTAS
    certificates: Certificates | None = None
    #: The keys that `keys` checks.
    ring: KeyRing | None = None


@asynccontextmanager
async def access(config: ServerConfig, services: Iterable[str] = ()) -> AsyncIterator[Access]:
    """Yield the access; within the block the keys are reloaded when their file changes. Raise ConfigError.

    `services` are the full names of those that are served beside ours.
    """
    certificates, keys = read_certificates(config), read_keys(config)
    if keys is None:
        yield Access(certificates=certificates)
        return
    watching, quotas = asyncio.create_task(keys.watch()), FrontendQuotas(Quotas(keys.limits))
    try:
        yield Access(ApiKeys(keys, config.api_keys_exempt, services), quotas, certificates, keys)
    finally:
        watching.cancel()


def read_certificates(config: ServerConfig) -> Certificates | None:
    """Read the certificates, if there are any. Raise ConfigError for an unusable file."""
    return Certificates(config.tls_cert, config.tls_key, config.tls_client_ca) if config.tls_cert else None


def read_keys(config: ServerConfig) -> KeyRing | None:
    """Read the API keys, if there are any. Raise ConfigError for an unusable file."""
    return KeyRing(config.api_keys_file) if config.api_keys_file else None
