"""The connection: what it tolerates, how it notices that the other side is gone, what is tried again."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import grpc
import grpc.aio

#: gRPC's own limit is five attempts in all.
MAX_RETRIES = 4

_RETRIED = [{"service": "photon_grpc.v1.InferenceService"}, {"service": "photon_grpc.v1.ModelService"}]

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


def open_channel(target: str, *, credentials: grpc.ChannelCredentials | None, retries: int) -> grpc.aio.Channel:
    """A channel that connects on first use. `target` is HOST:PORT, unix:PATH or any name gRPC resolves."""
    options = channel_options(target, retries)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def channel_options(target: str, retries: int) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = list(_OPTIONS)
    if retries > 0:
        options.append(("grpc.service_config", service_config(retries)))
    else:
        options.append(("grpc.enable_retries", 0))
    if is_loopback(target):
        # A proxy named in the environment is meant for other machines.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def service_config(retries: int) -> str:
    """gRPC's own retries: only before anything was received, after the server's `grpc-retry-pushback-ms` where it sends
    one.

    They carry `grpc-previous-rpc-attempts`, so that the server lets a retry take the place of its earlier attempt.
    """
    policy = {
        "maxAttempts": min(retries, MAX_RETRIES) + 1,
        "initialBackoff": "0.1s",
        "maxBackoff": "5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
    }
    return json.dumps({"methodConfig": [{"name": _RETRIED, "retryPolicy": policy}]})


def is_loopback(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
