"""One RPC: what is known of it, from its headers to its end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import grpc

from photon_grpc.core.admission import check_request_id
from photon_grpc.core.ask import Origin
from photon_grpc.core.counts import Labels
from photon_grpc.errors import NotAllowed, PhotonError
from photon_grpc.server.calls import methods
from photon_grpc.server.calls.metadata import REPLICA_KEY, REQUEST_ID_KEY, TRACEPARENT_KEY, Context
from photon_grpc.server.calls.status import CallStatus, call_status

_ATTEMPTS_KEY = "grpc-previous-rpc-attempts"
#: Only callers of these services, whom the API keys have let in, get the load; health checks need no key.
_REPORTS_LOAD = "/photon_grpc.v1."

Trailers = tuple[tuple[str, str | bytes], ...]


class CallFailures(Protocol):
    """A log of calls that fail."""

    def report(
        self, error: Exception, status: CallStatus, method: str, duration_s: float, *, is_request: bool = False
    ) -> None: ...


class CallCounts(Protocol):
    """Counts calls by method and status."""

    def started(self, labels: Labels) -> None: ...

    def ended(self, labels: Labels, code: str, duration_s: float) -> None: ...


class CallEnding(NamedTuple):
    """The log and the trailers that the calls of a server end with."""

    replica_id: str
    failures: CallFailures
    #: The trailers that report the load.
    load_report: Callable[[], Trailers]

    def trailers(self, method: str) -> Trailers:
        load = self.load_report() if method.startswith(_REPORTS_LOAD) else ()
        return ((REPLICA_KEY, self.replica_id), *load)


def _no_judge() -> None:
    """Let every call go on: this server asks for no keys."""


class Call:
    """Belongs to the task that gRPC runs it in; `current` finds it there and in the tasks that this one begins."""

    __slots__ = (
        *("caller", "context", "deadline_s", "ending", "headers", "is_request", "judge", "method", "owner", "peer"),
        *("refusal", "request_id", "started_s"),
    )

    context: Context

    def __init__(self, path: str, ending: CallEnding | None = None, headers: Mapping[str, str | bytes] | None = None):
        self.method = methods.of(path)
        self.ending = ending
        #: The last value of every header; gRPC copies them anew whenever it is asked.
        self.headers = headers or {}
        self.started_s = time.monotonic()
        #: The call's own, by the monotonic clock.
        self.deadline_s: float | None = None
        self.request_id = ""
        #: The name of the API key that let the call in; empty where none was asked for.
        self.owner = ""
        #: Raises NotAllowed once that key no longer lets the call in: for calls that outlive their key.
        self.judge: Callable[[], object] = _no_judge
        #: Whose share the call counts against: its owner, else its peer's host. All that come over one Unix socket, or
        #: through one proxy, are one.
        self.caller = self.peer = ""
        #: Why the call is refused before its message is received.
        self.refusal: PhotonError | None = None
        #: It came as far as to be a request: observers of requests see how it ends.
        self.is_request = False

    def begin(self, context: Context) -> None:
        """Note what gRPC knows once it runs the call, and name it. Raise InvalidRequest naming the header."""
        self.context = context
        remaining_s: float | None = context.time_remaining()
        self.deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
        peer: str = context.peer()
        self.peer = peer
        self.caller = self.owner or (peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer)
        self.request_id = secrets.token_hex(16)
        if given := self.header(REQUEST_ID_KEY):
            self.rename(given, REQUEST_ID_KEY)

    def rename(self, request_id: str, field: str) -> None:
        """Give the call the id that `field` holds. Raise InvalidRequest naming `field`."""
        check_request_id(request_id, field)
        self.request_id = request_id

    def header(self, key: str) -> str:
        """Return its last value; "" where the call has none."""
        value = self.headers.get(key, "")
        return value if isinstance(value, str) else value.decode("latin-1")

    @property
    def is_retry(self) -> bool:
        """Return whether gRPC made this attempt after an earlier one of the same call failed."""
        return self.header(_ATTEMPTS_KEY) not in ("", "0")

    def origin(self, method: str) -> Origin:
        """Return the origin of a request that has come just now."""
        return Origin(
            time.monotonic(),
            self.request_id,
            self.owner,
            method,
            deadline_s=self.deadline_s,
            traceparent=self.header(TRACEPARENT_KEY),
            caller=self.caller,
        )

    async def send_initial_metadata(self, context: Context) -> None:
        """Send the call's id and the replica's. Only for calls that have a message to send: a call that fails after
        this is never retried by gRPC."""
        replica_id = self.ending.replica_id if self.ending else ""
        await context.send_initial_metadata(((REQUEST_ID_KEY, self.request_id), (REPLICA_KEY, replica_id)))

    async def fail(self, error: Exception) -> None:
        """End the call by one `abort` with details and trailers, and log it. From any task."""
        if self.ending is None:
            raise error
        status = call_status(error, self.request_id)
        duration_s = time.monotonic() - self.started_s
        self.ending.failures.report(error, status, self.method.path, duration_s, is_request=self.is_request)
        # The frames it went through may hold megabytes of a message, and `abort` raises what refers in a circle to
        # itself and to this.
        error.__traceback__ = error.__context__ = None
        # `abort` drops trailers that were set before.
        last = self.ending.trailers("" if isinstance(error, NotAllowed) else self.method.path)
        try:
            await self.context.abort(status.code, status.text, (*status.trailers, *last))
        except grpc.aio.InternalError:
            # The call is over for its client (deadline, cancel). gRPC takes that for a crash of ours and prints a page,
            # unless it sees this.
            raise asyncio.CancelledError from None


_current: ContextVar[Call] = ContextVar("call")
#: Where methods are called without gRPC.
_NO_CALL = Call("")


def current() -> Call:
    """Return the call that the running task serves."""
    return _current.get(_NO_CALL)


#: grpc.aio runs every call in a task of its own, hence in a context of its own.
begin_call = _current.set
