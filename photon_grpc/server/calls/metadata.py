"""The metadata of calls: its keys and its size limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from photon_grpc.errors import InvalidRequest
from photon_grpc.server.calls import connections

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
REPLICA_KEY = "x-photon-replica"
NUMERICS_KEY = "x-photon-numerics"
#: Limit per call, counted as in HTTP/2: names, values and 32 bytes per entry. SETTINGS announces it to clients. It has
#: room for OpenTelemetry baggage (8 KiB), a token and what proxies add.
MAX_BYTES = 16 * 1024
_ENTRY_BYTES = 32
#: If gRPC refuses a call for its headers, all of them up to the one that crosses the limit remain.
_MOST_REFUSED_BYTES = 2 * MAX_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


def headers_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str | bytes] | None:
    """Return the last value of each header; None if they exceed what gRPC accepts after SETTINGS."""
    num_bytes = 0
    headers = {}
    for name, value in metadata or ():
        num_bytes += len(name) + len(value) + _ENTRY_BYTES
        if num_bytes > _MOST_REFUSED_BYTES:
            return None
        headers[name] = value
    return headers


async def refuse_oversized(messages: Any, context: Context) -> None:
    """Refuse a call with too many headers, and close its connection. Raise InvalidRequest.

    The client never acknowledged SETTINGS, so every further call on the connection would cost as much.
    """
    connections.hang_up(context.peer())
    raise InvalidRequest(f"the call's metadata has more than {MAX_BYTES} bytes: send less", limit=MAX_BYTES)
