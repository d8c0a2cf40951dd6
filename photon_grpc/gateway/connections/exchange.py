"""One request and its answer, as uvicorn's ASGI cycle, with errors that reveal nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from photon_grpc.errors import frames_of
from photon_grpc.gateway.connections.limits import ConnectionLimits
from photon_grpc.gateway.connections.refusal import HttpRefusal, PartialRequest

_LOG = logging.getLogger(__name__)
#: Lines per interval about exceptions of one class.
_MAX_LINES = 2
_INTERVAL_S = 5.0


class _SilentLogger(logging.Logger):
    """A logger that drops what uvicorn says, since that quotes exceptions and with them perhaps a prompt."""

    def __init__(self) -> None:
        super().__init__("uvicorn")
        self.disabled = True


SILENT_LOGGER = _SilentLogger()


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


class DeadlineTimer:
    """The next deadline of a connection. Its timer goes off at the earliest of all, since most are never reached."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = self._at_s = 0.0
        self._call: Callable[[], None] | None = None

    def set(self, delay_s: float, call: Callable[[], None]) -> None:
        self._call = call
        self._at_s = self._loop.time() + delay_s
        if self._timer is None or self._at_s < self._timer_s:
            self._start()

    def stop(self) -> None:
        self._call = None

    def close(self) -> None:
        """Set no more timers."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._at_s
        self._timer = self._loop.call_at(self._at_s, self._go_off)

    def _go_off(self) -> None:
        self._timer = None
        call = self._call
        if call is None:
            return
        if self._loop.time() < self._at_s:
            self._start()
        else:
            self._call = None
            call()


class Flow(FlowControl):
    """Flow control that measures how long reading was paused and cuts off a client that does not read."""

    def __init__(self, transport: asyncio.Transport, limits: ConnectionLimits) -> None:
        super().__init__(transport)
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._paused_at_s = 0.0
        self._paused_s = 0.0
        self._cut = DeadlineTimer()
        self._unsent_bytes = 0

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

    def close(self) -> None:
        self._cut.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cut.stop()

    def _watch(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._cut.set(self._limits.stalled_timeout_s, self._look)

    def _look(self) -> None:
        """Wait on for a client that reads a large piece slowly."""
        if self._unsent_bytes - self._transport.get_write_buffer_size() < self._limits.max_unsent_bytes:
            self._transport.abort()
        else:
            self._watch()


class AnsweringConnection(Protocol):
    """The connection of an exchange."""

    transport: asyncio.Transport
    #: No further request is read.
    is_ending: bool

    def answer_starts(self, exchange: Exchange) -> None:
        """Prepare for the head of the answer, which is sent next; may still clear `keep_alive`."""

    def end(self) -> None:
        """Close once the client has had time to read the answer."""


class Outgoing:
    """The transport as an exchange sees it: its close waits until the client has had time to read the answer."""

    def __init__(self, connection: AnsweringConnection) -> None:
        self._connection = connection
        self.write = connection.transport.write

    def is_closing(self) -> bool:
        return self._connection.is_ending

    def close(self) -> None:
        self._connection.end()


class _Completed:
    """An awaitable that is done."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_AT_ONCE = _Completed()


class Exchange(RequestResponseCycle):
    """A request and its answer."""

    connection: AnsweringConnection
    errors: AppErrors
    #: HTTP/1.0 has no chunks.
    _ends_by_closing = False
    #: The answer has begun, and its body consists of chunks.
    _is_in_chunks = False

    async def run_asgi(self, app: Any) -> None:
        async def reported(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except Exception as error:
                self.errors.report(error)
                raise

        await super().run_asgi(reported)

    def send(self, message: Any) -> Any:
        """Write at once a piece that its chunk and the transport's buffer take, and return what to wait for."""
        body = message.get("body")
        is_piece = self._is_in_chunks and body and message.get("more_body")
        if not is_piece or self.flow.write_paused or self.disconnected:
            return self._send_other(message)
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return _AT_ONCE

    async def _send_other(self, message: Any) -> None:
        if not self.response_started and message["type"] == "http.response.start":
            self.connection.answer_starts(self)
            names = {name.lower() for name, _ in message.get("headers", ())}
            if self.scope["http_version"] == "1.0" and b"content-length" not in names:
                self._ends_by_closing, self.chunked_encoding = True, False
        elif self._ends_by_closing:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
        self._is_in_chunks = (
            bool(self.chunked_encoding) and not self.response_complete and self.scope["method"] != "HEAD"
        )

    async def send_500_response(self) -> None:
        refusal = HttpRefusal(500, "INTERNAL_FAILURE", "the server failed; its log says more")
        asked = PartialRequest(self.scope["method"], self.scope["path"], self.scope["headers"])
        headers = [*refusal.headers(asked), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": refusal.body(asked), "more_body": False})
