"""The connection: its limits, keepalive, retries and choice of servers."""

from __future__ import annotations

import ipaddress
import json
from importlib.resources import files
from typing import Any

import grpc
import grpc.aio

#: A copy of clients/service_config.json, which the clients of all languages include.
SERVICE_CONFIG: dict[str, Any] = json.loads(files(__package__).joinpath("service_config.json").read_text("utf-8"))

#: Retries that the service config allows after the first attempt.
MAX_RETRIES = int(SERVICE_CONFIG["methodConfig"][0]["retryPolicy"]["maxAttempts"]) - 1

#: The server accepts a ping every 10 s, so a silently lost connection is noticed within 18 s.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Finds a starting server soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # The server limits what it accepts, and sends only what was requested.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC never retries a larger request; its default of 256 KiB is less than a long prompt.
    ("grpc.per_rpc_retry_buffer_size", 4 * 1024 * 1024),
)


def open_channel(
    target: str, *, credentials: grpc.ChannelCredentials | None, retries: int, only_ready: bool = True
) -> grpc.aio.Channel:
    """Return a channel that connects on first use. `target` is HOST:PORT, unix:PATH or any name that gRPC resolves.

    With `only_ready` calls go to servers that report ready, and fail with UNAVAILABLE if there are none.
    """
    options = channel_options(target, retries)
    if not only_ready:
        options.append(("grpc.inhibit_health_checking", 1))
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def tls_credentials(ca: bytes | None, certificate: bytes | None, key: bytes | None) -> grpc.ChannelCredentials:
    """Return credentials from PEM contents: trusted authorities (None: gRPC's), the client's certificate, its key."""
    return grpc.ssl_channel_credentials(ca, key, certificate)


def channel_options(target: str, retries: int) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [*_OPTIONS, ("grpc.service_config", service_config(retries))]
    if retries <= 0:
        options.append(("grpc.enable_retries", 0))
    if is_loopback(target):
        # A proxy from the environment is meant for other machines.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def service_config(retries: int) -> str:
    """Return the service config with `retries` after the first attempt, at most as many as it allows.

    gRPC retries only before anything is received, after the server's `grpc-retry-pushback-ms` if there is one (never
    if it is negative), and never a cancelled call. A retry carries `grpc-previous-rpc-attempts`, so the server lets it
    replace the earlier attempt.
    """
    methods = SERVICE_CONFIG["methodConfig"]
    attempts = 1 + max(0, min(retries, MAX_RETRIES))
    limited = [each | {"retryPolicy": each["retryPolicy"] | {"maxAttempts": attempts}} for each in methods]
    return json.dumps(SERVICE_CONFIG | {"methodConfig": limited if attempts > 1 else []})


def is_loopback(target: str) -> bool:
    """Return whether `target` is on this machine: one address, or `ipv4:` and a list of addresses."""
    hosts = (address.rpartition(":")[0].strip("[]") for address in target.removeprefix("ipv4:").split(","))
    return all(_is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
