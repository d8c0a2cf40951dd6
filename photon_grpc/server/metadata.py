"""A call's metadata: its id, its deadline, whether it is another attempt; whose it is, and who answers it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import grpc

from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.record import Origin
from photon_grpc.server import connections

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
REPLICA_KEY = "x-photon-replica"
MAX_REQUEST_ID_CHARS = 128
#: Of a call, counted as HTTP/2 does: names, values and 32 for each. Clients are told in SETTINGS. Room for a baggage of
#: OpenTelemetry (8 KiB), a token and what proxies add.
MAX_BYTES = 16 * 1024
_ENTRY_BYTES = 32
#: What is left of the headers of a call that gRPC refuses for them: all up to the one that crosses the limit.
_MOST_REFUSED_BYTES = 2 * MAX_BYTES
_ATTEMPTS_KEY = "grpc-previous-rpc-attempts"

Context = grpc.aio.ServicerContext[Any, Any]

#: grpc.aio runs every call in a task of its own, hence in a context of its own.
_request_id: ContextVar[str] = ContextVar("request_id", default="")
_owner: ContextVar[str] = ContextVar("owner", default="")
_holder: ContextVar[str] = ContextVar("holder", default="")
_replica_id: ContextVar[str] = ContextVar("replica_id", default="")
#: The call is a request, whose end observers of requests are told.
_is_request: ContextVar[bool] = ContextVar("is_request", default=False)
#: The last value of every header, copied out of gRPC once.
_headers: ContextVar[Mapping[str, str | bytes]] = ContextVar("headers", default=MappingProxyType({}))


def _trust() -> None:
    """Of a server that asks for no keys."""


_judge: ContextVar[Callable[[], object]] = ContextVar("judge", default=_trust)


def take(headers: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Note a call's headers, which gRPC copies anew whenever it is asked for them. False, and none are noted, where
    they are more than gRPC lets in from a client that has acknowledged SETTINGS."""
    num_bytes = 0
    taken = {}
    for name, value in headers or ():
        num_bytes += len(name) + len(value) + _ENTRY_BYTES
        if num_bytes > _MOST_REFUSED_BYTES:
            return False
        taken[name] = value
    _headers.set(taken)
    return True


async def refuse_oversized(messages: Any, context: Context) -> None:
    """Answer a call whose headers were not taken. Its client never acknowledged SETTINGS, and every further call would
    cost as much: the connection ends. Raise InvalidRequest."""
    connections.hang_up(context.peer())
    raise InvalidRequest(f"the call's metadata has more than {MAX_BYTES} bytes: send less", limit=MAX_BYTES)


def name_call(replica_id: str) -> None:
    """Give the call the id of its header, or a new one, and the id of who answers it. Raise InvalidRequest naming the
    header."""
    _replica_id.set(replica_id)
    _request_id.set(secrets.token_hex(16))
    if given := _header(REQUEST_ID_KEY):
        rename_call(given, REQUEST_ID_KEY)


def rename_call(request_id: str, field: str) -> None:
    """Give the call the id that `field` holds. Raise InvalidRequest naming `field`."""
    check_request_id(request_id, field)
    _request_id.set(request_id)


def check_request_id(request_id: str, field: str) -> None:
    """Raise InvalidRequest naming `field`."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(f"{field} must be at most {MAX_REQUEST_ID_CHARS} printable ASCII characters", field=field)


def request_id() -> str:
    """The id of the call that the running task serves."""
    return _request_id.get()


def set_owner(name: str, judge: Callable[[], object]) -> None:
    """The call is made with the API key of this name; `judge` raises NotAllowed once it no longer lets the call in."""
    _owner.set(name)
    _judge.set(judge)


def judge_again() -> None:
    """For calls that outlive their key. Raise NotAllowed."""
    _judge.get()()


def owner() -> str:
    """The name of the API key that the call of the running task was let in by; empty where none was asked for."""
    return _owner.get()


def set_holder(context: Context) -> None:
    _holder.set(caller(context))


def holder() -> str:
    """The owner of the places that the call of the running task takes: its `caller`."""
    return _holder.get()


async def send_initial_metadata(context: Context) -> None:
    """Send the call's id and the replica's. Only for calls that have a message to send: a call that fails after this is
    never retried by gRPC."""
    await context.send_initial_metadata(((REQUEST_ID_KEY, request_id()), (REPLICA_KEY, _replica_id.get())))


def is_retry() -> bool:
    """Return whether gRPC made this attempt after an earlier one of the same call failed."""
    return _header(_ATTEMPTS_KEY) not in ("", "0")


def caller(context: Context) -> str:
    """Return whose share a call counts against: the name of its API key; without keys, its peer's host. All that come
    over one Unix socket, or through one proxy, are one."""
    if name := owner():
        return name
    peer: str = context.peer()
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


def set_request() -> None:
    """Note that the call is a request. The caller of this tells observers of requests how it ends."""
    _is_request.set(True)


def is_request() -> bool:
    """Return whether the call of the running task came as far as to be a request."""
    return _is_request.get()


def origin(context: Context, method: str) -> Origin:
    """Of a call that has come just now."""
    arrival_s = time.monotonic()
    remaining_s: float | None = context.time_remaining()
    return Origin(
        arrival_s,
        request_id(),
        owner(),
        method,
        deadline_s=None if remaining_s is None else arrival_s + remaining_s,
        traceparent=_header(TRACEPARENT_KEY),
        caller=caller(context),
    )


def _header(key: str) -> str:
    """Empty where the call has none."""
    value = _headers.get().get(key, "")
    return value if isinstance(value, str) else value.decode("latin-1")
