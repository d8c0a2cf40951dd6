"""The state of one HTTP call, from its head to its end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from photon_grpc.core.admission import MAX_REQUEST_ID_CHARS, check_request_id
from photon_grpc.core.ask import Origin
from photon_grpc.errors import InvalidRequest
from photon_grpc.gateway.calls.errors import ErrorForm
from photon_grpc.gateway.calls.events import Events

REQUEST_ID = "x-request-id"
#: Names the fields of the body that had no effect.
IGNORED = "x-photon-ignored"
#: Milliseconds from the arrival of the call to its deadline.
TIMEOUT_MS = "x-request-timeout-ms"
#: Milliseconds that a router gives the first token (llm-d's endpoint picker).
FIRST_TOKEN_MS = "x-llm-d-slo-ttft-ms"
#: A day, after which any deadline is as good as none.
_MAX_MS = 86_400_000
_MAX_MS_DIGITS = len(str(_MAX_MS))


class HttpCall:
    """One call. Belongs to the task in which the server runs it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, route: str) -> None:
        """Take the ASGI call; `route` is the path as the table of routes has it."""
        self.request = Request(scope, receive, send)
        self.headers = self.request.headers
        self.route = route
        self.started_s = time.monotonic()
        #: Monotonic time.
        self.deadline_s: float | None = None
        #: Time in which the request must have a place, if the caller sets one.
        self.max_queue_s: float | None = None
        self.request_id = secrets.token_hex(16)
        #: The name of the API key that admitted the call; empty without keys.
        self.owner = ""
        #: Whose share the call counts against: its owner, else its peer's host.
        self.caller = _host(scope)
        #: None in memory, without a server.
        self._connection = connection_of(scope)
        #: Fields without effect, which a header of the answer names.
        self.ignored: tuple[str, ...] = ()
        #: The places in this body by the paths that errors have, beside the names of the endpoint.
        self.places: Mapping[str, str] = {}
        #: The form of errors after output began, if it depends on the output.
        self.errors: ErrorForm | None = None
        #: The call counts as a request, so observers of requests see its end.
        self.is_request = False
        #: Set by `guard` before the call is answered.
        self.events: Events

    def begin(self, owner: str) -> None:
        """Set the owner, the request id and the deadline. Raise InvalidRequest naming the header."""
        self.owner = owner
        self.caller = owner or self.caller
        if request_id := self.headers.get(REQUEST_ID):
            check_request_id(request_id, REQUEST_ID)
            self.request_id = request_id
        if (timeout_s := self._seconds(TIMEOUT_MS)) is not None:
            self.deadline_s = self.started_s + timeout_s
        self.max_queue_s = self._seconds(FIRST_TOKEN_MS)

    def free_body(self) -> None:
        """Give back the memory that the body is counted with, once it is parsed."""
        if self._connection is not None:
            self._connection.free_body()

    def note_ignored(self, fields: tuple[str, ...]) -> None:
        """Have a header of the answer name the fields without effect."""
        self.ignored = fields
        if fields:
            self.events.prepare({IGNORED: ", ".join(fields)})

    def origin(self, suffix: str = "") -> Origin:
        """Return the origin of a request that arrives now. `suffix` tells apart several requests of one call."""
        return Origin(
            time.monotonic(),
            self.request_id[: MAX_REQUEST_ID_CHARS - len(suffix)] + suffix,
            self.owner,
            self.route,
            deadline_s=self.deadline_s,
            traceparent=self.headers.get("traceparent", ""),
            caller=self.caller,
            create_time_s=time.time(),
        )

    def _seconds(self, name: str) -> float | None:
        text = self.headers.get(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_MS_DIGITS and 0 < int(text) <= _MAX_MS):
            raise InvalidRequest(f"{name}: is milliseconds, a number from 1 to {_MAX_MS}", field=name, limit=_MAX_MS)
        return int(text) / 1000


def _host(scope: Mapping[str, Any]) -> str:
    client = scope.get("client")
    return f"{'ipv6' if ':' in client[0] else 'ipv4'}:{client[0]}" if client and client[0] else "unix:"


def connection_of(scope: Mapping[str, Any]) -> Any:
    """Return the HttpConnection of a call; None in memory."""
    return scope.get("extensions", {}).get("photon.connection")


def end_when_lost(scope: Mapping[str, Any]) -> None:
    """Cancel the running task when the caller is gone, so that its request is aborted."""
    connection, task = connection_of(scope), asyncio.current_task()
    if connection is not None and task is not None:
        connection.on_lost(task.cancel)
