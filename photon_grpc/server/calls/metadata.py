"""The metadata of calls: its keys, and how much of it is let in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from photon_grpc.errors import InvalidRequest
from photon_grpc.server.calls import connections

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
REPLICA_KEY = "x-photon-replica"
#: Of a call, counted as HTTP/2 does: names, values and 32 for each. Clients are told in SETTINGS. Room for a baggage of
#: OpenTelemetry (8 KiB), a token and what proxies add.
MAX_BYTES = 16 * 1024
_ENTRY_BYTES = 32
#: What is left of the headers of a call that gRPC refuses for them: all up to the one that crosses the limit.
_MOST_REFUSED_BYTES = 2 * MAX_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


def headers_of(given: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str | bytes] | None:
    """Return a call's headers, the last value of each; None where they are more than gRPC lets in from a client that
    has acknowledged SETTINGS."""
    num_bytes = 0
    headers = {}
    for name, value in given or ():
        num_bytes += len(name) + len(value) + _ENTRY_BYTES
        if num_bytes > _MOST_REFUSED_BYTES:
            return None
        headers[name] = value
    return headers


async def refuse_oversized(messages: Any, context: Context) -> None:
    """Answer a call whose headers were not taken. Its client never acknowledged SETTINGS, and every further call would
    cost as much: the connection ends. Raise InvalidRequest."""
    connections.hang_up(context.peer())
    raise InvalidRequest(f"the call's metadata has more than {MAX_BYTES} bytes: send less", limit=MAX_BYTES)
