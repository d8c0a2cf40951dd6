"""The state of one RPC, from its headers to its end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Container, Mapping
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import grpc

from photon_grpc.core.admission import check_request_id
from photon_grpc.core.ask import Origin
from photon_grpc.core.counts import Labels
from photon_grpc.errors import NotAllowed, PhotonError
from photon_grpc.server.calls import methods
from photon_grpc.server.calls.metadata import NUMERICS_KEY, REPLICA_KEY, REQUEST_ID_KEY, TRACEPARENT_KEY, Context
from photon_grpc.server.calls.status import CallStatus, call_status

_ATTEMPTS_KEY = "grpc-previous-rpc-attempts"
#: Load and numerics are reported only to callers of these services, since they have passed the API keys; health checks
#: need no key.
_REPORTS = "/photon_grpc.v1."

Trailers = tuple[tuple[str, str | bytes], ...]


class CallFailures(Protocol):
    """A log of calls that fail."""

    def report(
        self, error: Exception, status: CallStatus, method: str, duration_s: float, *, is_request: bool = False
    ) -> None: ...


class CallCounts(Protocol):
    """Counters of calls by method and status."""

    def started(self, labels: Labels) -> None: ...

    def ended(self, labels: Labels, code: str, duration_s: float) -> None: ...


class CallEnding(NamedTuple):
    """The log and the trailers with which a server's calls end."""

    replica_id: str
    failures: CallFailures
    #: Returns the trailers that report the load.
    load_report: Callable[[], Trailers]
    #: Returns the version of the engine's numerics, "" while there is none.
    numerics_version: Callable[[], str]
    #: Paths of methods outside our packages whose callers are told the same.
    served: Container[str] = ()

    def trailers(self, method: str) -> Trailers:
        is_told = method.startswith(_REPORTS) or method in self.served
        reports = (*self.numerics(), *self.load_report()) if is_told else ()
        return ((REPLICA_KEY, self.replica_id), *reports)

    def numerics(self) -> Trailers:
        """Return the entry with the version, none while there is no engine."""
        version = self.numerics_version()
        return ((NUMERICS_KEY, version),) if version else ()


def _no_key_check() -> None:
    """Accept every call, on a server without API keys."""


class Call:
    """One RPC. Belongs to the task in which gRPC runs it; `current` finds it there and in the tasks started from it."""

    __slots__ = (
        *("caller", "check_key", "context", "deadline_s", "ending", "headers", "is_request", "method", "owner", "peer"),
        *("refusal", "request_id", "started_s", "trailers"),
    )

    context: Context

    def __init__(
        self,
        path: str,
        ending: CallEnding | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        method: methods.Method | None = None,
    ):
        self.method = method or methods.of(path)
        self.ending = ending
        #: The last value of every header, kept because gRPC copies all headers at every access.
        self.headers = headers or {}
        self.started_s = time.monotonic()
        #: Monotonic time.
        self.deadline_s: float | None = None
        self.request_id = ""
        #: The name of the API key that admitted the call; empty without keys.
        self.owner = ""
        #: Raises NotAllowed once that key no longer admits the call. For calls that may outlive their key.
        self.check_key: Callable[[], object] = _no_key_check
        #: Whose share the call counts against: its owner, else its peer's host. All callers behind one Unix socket or
        #: one proxy count as one.
        self.caller = self.peer = ""
        #: Why the call is refused before its message is received.
        self.refusal: PhotonError | None = None
        #: The call counts as a request, so observers of requests see its end.
        self.is_request = False
        #: Trailers of the method itself.
        self.trailers: Trailers = ()

    def begin(self, context: Context) -> None:
        """Set the deadline, the peer and the request id from `context`. Raise InvalidRequest naming the header."""
        self.context = context
        remaining_s: float | None = context.time_remaining()
        self.deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
        peer: str = context.peer()
        self.peer = peer
        self.caller = self.owner or (peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer)
        self.request_id = secrets.token_hex(16)
        if request_id := self.header(REQUEST_ID_KEY):
            self.rename(request_id, REQUEST_ID_KEY)

    def rename(self, request_id: str, field: str) -> None:
        """Set the request id to the value of `field`. Raise InvalidRequest naming `field`."""
        check_request_id(request_id, field)
        self.request_id = request_id

    def header(self, key: str) -> str:
        """Return the last value of a header; "" if there is none."""
        value = self.headers.get(key, "")
        return value if isinstance(value, str) else value.decode("latin-1")

    @property
    def is_retry(self) -> bool:
        """Return whether this is a retry by gRPC after an earlier attempt failed."""
        return self.header(_ATTEMPTS_KEY) not in ("", "0")

    def origin(self, method: str) -> Origin:
        """Return the origin of a request that arrives now."""
        return Origin(
            time.monotonic(),
            self.request_id,
            self.owner,
            method,
            deadline_s=self.deadline_s,
            traceparent=self.header(TRACEPARENT_KEY),
            caller=self.caller,
            create_time_s=time.time(),
        )

    async def send_initial_metadata(self, context: Context) -> None:
        """Send the ids of request and replica, and the numerics. A message must follow: now gRPC retries no failure."""
        replica_id = self.ending.replica_id if self.ending else ""
        numerics = self.ending.numerics() if self.ending else ()
        await context.send_initial_metadata(((REQUEST_ID_KEY, self.request_id), (REPLICA_KEY, replica_id), *numerics))

    async def fail(self, error: Exception) -> None:
        """Abort the call with details and trailers, and log it. May be called from any task."""
        if self.ending is None:
            raise error
        status = call_status(error, self.request_id)
        duration_s = time.monotonic() - self.started_s
        self.ending.failures.report(error, status, self.method.path, duration_s, is_request=self.is_request)
        # The traceback's frames may hold megabytes of a message, and the exception that `abort` raises would keep them
        # alive in a reference cycle.
        error.__traceback__ = error.__context__ = None
        # `abort` drops trailers that were set before.
        own_trailers = self.ending.trailers("" if isinstance(error, NotAllowed) else self.method.path)
        try:
            await self.context.abort(status.code, status.text, (*status.trailers, *self.trailers, *own_trailers))
        except grpc.aio.InternalError:
            # The call has ended for its client (deadline, cancel). gRPC logs any other exception as a crash.
            raise asyncio.CancelledError from None


_current: ContextVar[Call] = ContextVar("call")
#: For methods that are called without gRPC.
_NO_CALL = Call("")


def current() -> Call:
    """Return the call that the running task serves."""
    return _current.get(_NO_CALL)


#: grpc.aio runs every call in its own task, and so in its own context.
begin_call = _current.set
