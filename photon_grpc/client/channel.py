"""The connection: what it tolerates, how it notices that the other side is gone, what is tried again, and where."""

from __future__ import annotations

import ipaddress
import json
from importlib.resources import files
from typing import Any

import grpc
import grpc.aio

#: A copy of clients/service_config.json, which the clients of all languages carry.
SERVICE_CONFIG: dict[str, Any] = json.loads(files(__package__).joinpath("service_config.json").read_text("utf-8"))

#: The retries that the service config allows, after the first attempt.
MAX_RETRIES = int(SERVICE_CONFIG["methodConfig"][0]["retryPolicy"]["maxAttempts"]) - 1

#: In step with the server: it accepts a ping every 10 s, so a silent drop is noticed within 18 s.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that is starting is found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # The server says what it accepts; what it sends is what was asked for.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A request larger than this is sent once; gRPC's 256 KiB is less than a long prompt.
    ("grpc.per_rpc_retry_buffer_size", 4 * 1024 * 1024),
)


def open_channel(
    target: str, *, credentials: grpc.ChannelCredentials | None, retries: int, only_ready: bool = True
) -> grpc.aio.Channel:
    """Return a channel that connects on first use. `target` is HOST:PORT, unix:PATH or any name gRPC resolves.

    With `only_ready` calls go to servers that say they are ready, and fail with UNAVAILABLE where none does.
    """
    options = channel_options(target, retries)
    if not only_ready:
        options.append(("grpc.inhibit_health_checking", 1))
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def tls_credentials(ca: bytes | None, certificate: bytes | None, key: bytes | None) -> grpc.ChannelCredentials:
    """Of PEM files: the authorities to believe (None: those that gRPC comes with), and the client's own certificate
    with its key, for a server that asks for one."""
    return grpc.ssl_channel_credentials(ca, key, certificate)


def channel_options(target: str, retries: int) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [*_OPTIONS, ("grpc.service_config", service_config(retries))]
    if retries <= 0:
        options.append(("grpc.enable_retries", 0))
    if is_loopback(target):
        # A proxy named in the environment is meant for other machines.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def service_config(retries: int) -> str:
    """Return the service config with `retries` after the first attempt, or as many as it has where that is less.

    gRPC tries again only before anything was received, after the server's `grpc-retry-pushback-ms` where it sends one
    (a negative one: not at all), and never what its caller cancelled. A retry carries `grpc-previous-rpc-attempts`, so
    that the server lets it take the place of its earlier attempt.
    """
    methods = SERVICE_CONFIG["methodConfig"]
    attempts = 1 + max(0, min(retries, MAX_RETRIES))
    limited = [each | {"retryPolicy": each["retryPolicy"] | {"maxAttempts": attempts}} for each in methods]
    return json.dumps(SERVICE_CONFIG | {"methodConfig": limited if attempts > 1 else []})


def is_loopback(target: str) -> bool:
    """Return whether it is one address, or `ipv4:` and a list of them, on this machine."""
    hosts = (address.rpartition(":")[0].strip("[]") for address in target.removeprefix("ipv4:").split(","))
    return all(_is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
