"""The limits of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field

from photon_grpc.gateway.connections.head import HeadLimits

MAX_BODY_BYTES = 2**25


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of each connection, and of all of them in one front end."""

    head: HeadLimits = field(default_factory=HeadLimits)
    #: Time for a whole head, from the connection or from its first byte.
    head_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0
    #: Time for a whole body: so long, and more for every MiB that has arrived.
    body_timeout_s: float = 30.0
    body_timeout_s_per_mib: float = 1.0
    #: Time between an answer and the next request.
    idle_timeout_s: float = 75.0
    #: Time in which a client must read `max_unsent_bytes` or all that waits for it.
    stalled_timeout_s: float = 120.0
    #: Time to read on after a refusal. Closing at once would reset the connection before the client has read it.
    linger_s: float = 2.0
    #: Bytes of an answer that wait for the client before its writer waits.
    max_unsent_bytes: int = 64 * 1024
    #: Bytes of further requests that are read while an answer runs.
    max_ahead_bytes: int = 16 * 1024
    max_connections: int = 1000
    #: Bytes of all bodies whose answers have not begun.
    max_held_bytes: int = 2**27
