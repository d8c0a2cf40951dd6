"""One request and its answer, as uvicorn's ASGI cycle, with errors that reveal nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from photon_grpc.errors import frames_of
from photon_grpc.gateway.connections.refusal import Refusal

if TYPE_CHECKING:
    from photon_grpc.gateway.connections.connection import Connection

_LOG = logging.getLogger(__name__)
#: Lines per interval about exceptions of one class.
_MAX_LINES = 2
_INTERVAL_S = 5.0


class _Nowhere(logging.Logger):
    """What uvicorn says: it would quote the exception, and with it perhaps a prompt."""

    def __init__(self) -> None:
        super().__init__("uvicorn")
        self.disabled = True


NOWHERE = _Nowhere()


class AppErrors:
    """The rate-limited log of exceptions that the app let through, without their texts."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def report(self, error: Exception) -> None:
        name = type(error).__name__
        if not self._counts:
            asyncio.get_running_loop().call_later(_INTERVAL_S, self._counts.clear)
        self._counts[name] += 1
        if self._counts[name] <= _MAX_LINES:
            _LOG.error("an HTTP call failed: %s\n%s", name, frames_of(error))


class Alarm:
    """The next deadline of a connection."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_s: float, call: Callable[[], None]) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(delay_s, call)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Flow(FlowControl):
    """Flow control that measures how long reading was paused and cuts off a client that does not read."""

    def __init__(self, transport: asyncio.Transport, stalled_timeout_s: float) -> None:
        super().__init__(transport)
        self._stalled_timeout_s = stalled_timeout_s
        self._loop = asyncio.get_running_loop()
        self._paused_at_s = 0.0
        self._paused_s = 0.0
        self._cut = Alarm()

    def paused_s(self) -> float:
        """Return for how long reading has been paused in all."""
        return self._paused_s + (self._loop.time() - self._paused_at_s if self.read_paused else 0.0)

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused_at_s = self._loop.time()
        super().pause_reading()

    def resume_reading(self) -> None:
        self._paused_s = self.paused_s()
        super().resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cut.set(self._stalled_timeout_s, self._transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cut.stop()


class Outgoing:
    """The transport as an exchange sees it: its close waits until the client has had time to read the answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write

    def is_closing(self) -> bool:
        return self._connection.is_ending

    def close(self) -> None:
        self._connection.end()


class Exchange(RequestResponseCycle):
    """A request and its answer."""

    connection: Connection
    errors: AppErrors
    #: HTTP/1.0 has no chunks.
    _ends_by_closing = False

    async def run_asgi(self, app: Any) -> None:
        async def reported(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except Exception as error:
                self.errors.report(error)
                raise

        await super().run_asgi(reported)

    async def send(self, message: Any) -> None:
        if not self.response_started and message["type"] == "http.response.start":
            self.connection.answer_starts(self)
            names = {name.lower() for name, _ in message.get("headers", ())}
            if self.scope["http_version"] == "1.0" and b"content-length" not in names:
                self._ends_by_closing, self.chunked_encoding = True, False
        elif self._ends_by_closing:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    async def send_500_response(self) -> None:
        refusal = Refusal(500, "INTERNAL_FAILURE", "the server failed; its log says more")
        headers = [*refusal.headers(), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": refusal.body(), "more_body": False})
