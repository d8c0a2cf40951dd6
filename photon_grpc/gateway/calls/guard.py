"""Every HTTP call from its head to its end: admitted, answered, counted, and ended if it fails.

Nothing that a caller wrote is logged, and the text of an unexpected exception never leaves the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from photon_grpc.access.credentials import checked_key
from photon_grpc.access.key_ring import KeyRing
from photon_grpc.core.ask import is_out_of_time
from photon_grpc.errors import DeadlinePassed
from photon_grpc.gateway.calls.call import IGNORED, HttpCall, end_when_lost
from photon_grpc.gateway.calls.errors import CLIENT_CLOSED, OPENAI_ERRORS, ErrorForm, Failure, HttpError, failure_of
from photon_grpc.gateway.calls.events import Events
from photon_grpc.observe.failure_log import FailureLog

REPLICA_ID = "x-photon-replica"
NUMERICS = "x-photon-numerics"
_WITHOUT_BODY = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})

#: Answers a call; None if it has written its events.
Answer = Callable[[HttpCall], Awaitable[Response | None]]


class HttpCounts(Protocol):
    """Counters of calls by route, and of fields without effect."""

    def ended(self, route: str, method: str, status: int, duration_s: float) -> None: ...

    def ignored(self, field: str) -> None: ...


class NoHttpCounts:
    """Counters that count nothing."""

    def ended(self, route: str, method: str, status: int, duration_s: float) -> None:
        pass

    def ignored(self, field: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class HttpRules:
    """The rules for all calls of a server."""

    failures: FailureLog
    #: The value of x-photon-replica.
    replica_id: str = ""
    #: None: no key is needed.
    keys: KeyRing | None = None
    #: Values of --api-keys-exempt.
    exempt: Sequence[str] = ()
    counts: HttpCounts = field(default_factory=NoHttpCounts)
    #: Returns the value of x-photon-numerics, "" while there is no engine.
    numerics_version: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route, and the answer to its calls."""

    route: str
    answer: Answer
    methods: tuple[str, ...] = ("POST",)
    #: Of which a key needs one; none: any key is enough.
    scopes: tuple[str, ...] = ()
    #: No key is needed.
    is_open: bool = False
    #: The value of --api-keys-exempt that exempts it.
    exemption: str = ""
    errors: ErrorForm = OPENAI_ERRORS
    #: The API's names of fields by their paths in errors.
    names: Mapping[str, str] = field(default_factory=dict)
    reads_json: bool = True


class GuardedEndpoint:
    """The ASGI application of one route."""

    def __init__(self, endpoint: Endpoint, rules: HttpRules) -> None:
        self._endpoint = endpoint
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpCall(scope, receive, send, route=self._endpoint.route)
        status = _Status(send)
        call.events = Events(status)
        end_when_lost(scope)
        try:
            await self._answered(call, scope, receive, status)
        except asyncio.CancelledError:
            # The caller is gone, or the server aborts what its drain has left.
            status.code = CLIENT_CLOSED
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        finally:
            call.events.stop()
            duration_s = time.monotonic() - call.started_s
            self._rules.counts.ended(call.route, scope["method"], status.code, duration_s)
            for name in call.ignored:
                self._rules.counts.ignored(name)

    async def _answered(self, call: HttpCall, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._admit(call)
            response = await self._in_time(call)
            if response is None:
                await call.events.close()
                return
            response.headers.update(self._headers(call))
            await response(scope, receive, send)
        except Exception as error:
            await self._fail(call, error, scope, receive, send)

    def _admit(self, call: HttpCall) -> None:
        """Check key, method and type of the body. Raise HttpError, NotAllowed, InvalidRequest."""
        endpoint, rules = self._endpoint, self._rules
        owner = ""
        if not (endpoint.is_open or rules.keys is None or endpoint.exemption in rules.exempt):
            owner = checked_key(rules.keys, _authorizations(call), endpoint.scopes).name
        call.begin(owner)
        if call.request.method not in endpoint.methods:
            allowed = ", ".join(endpoint.methods)
            message = f"this path takes {allowed}, not {call.request.method[:20]}"
            headers = {"allow": allowed}
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, message, reason="METHOD_NOT_ALLOWED", headers=headers)
        if endpoint.reads_json and call.request.method not in _WITHOUT_BODY:
            _check_body_type(call)
        call.events.prepare(self._headers(call))

    async def _in_time(self, call: HttpCall) -> Response | None:
        try:
            async with asyncio.timeout_at(call.deadline_s):
                return await self._endpoint.answer(call)
        except TimeoutError:
            if not is_out_of_time(call.started_s, call.deadline_s):
                raise
            raise DeadlinePassed("the deadline has passed") from None

    async def _fail(self, call: HttpCall, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        failure = failure_of(error, call.request_id, {**self._endpoint.names, **call.places})
        duration_s = time.monotonic() - call.started_s
        self._rules.failures.report(error, failure, call.route, duration_s, is_request=call.is_request)
        if call.events.has_begun:
            await call.events.write((call.errors or self._endpoint.errors).event(failure))
            await call.events.close()
        else:
            await self._refusal(call, failure)(scope, receive, send)

    def _refusal(self, call: HttpCall, failure: Failure) -> Response:
        body = b"" if call.request.method == "HEAD" else self._endpoint.errors.body(failure)
        headers = self._headers(call) | failure.headers()
        return Response(body, failure.status, headers, media_type="application/json")

    def _headers(self, call: HttpCall) -> dict[str, str]:
        headers = self._endpoint.errors.headers(call.request_id) | {REPLICA_ID: self._rules.replica_id}
        if version := self._rules.numerics_version():
            headers[NUMERICS] = version
        return headers | {IGNORED: ", ".join(call.ignored)} if call.ignored else headers


class _Status:
    """The ASGI `send` of a call, which notes the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.code = CLIENT_CLOSED

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.code = message["status"]
        await self._send(message)


def _check_body_type(call: HttpCall) -> None:
    """Raise HttpError for what is not plain JSON: a page may send other types across origins without asking first."""
    kinds = call.headers.getlist("content-type")
    kind, _, parameters = (kinds[0].lower() if len(kinds) == 1 else "").partition(";")
    is_utf_8 = parameters.replace(" ", "").replace('"', "") in ("", "charset=utf-8", "charset=utf8")
    text, headers = "", {}
    if kind.strip() != "application/json" or not is_utf_8:
        text = "send the body as Content-Type: application/json, in UTF-8"
    elif any(each.lower() not in ("", "identity") for each in call.headers.getlist("content-encoding")):
        text, headers = "send the body as it is, without Content-Encoding", {"accept-encoding": "identity"}
    if text:
        raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text, reason="UNSUPPORTED_MEDIA_TYPE", headers=headers)


def _authorizations(call: HttpCall) -> list[str]:
    """Return the keys of a call as `authorization` headers have them; Anthropic's clients send `x-api-key`."""
    found = call.headers.getlist("authorization") + [f"Bearer {key}" for key in call.headers.getlist("x-api-key")]
    return list(dict.fromkeys(found))
