"""One TCP connection of the HTTP server, with its limits and deadlines.

uvicorn's protocol turns requests into ASGI calls; it has no deadline for a slow head or body and no bound of their
sizes. Here a head is gathered and checked before the parser sees it, so bytes of a malformed request never reach the
parser. One request is answered at a time; what the client sends ahead stays unparsed.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from photon_grpc.access.places import Place
from photon_grpc.errors import PhotonError
from photon_grpc.gateway.connections.arriving_body import ArrivingBody, too_large
from photon_grpc.gateway.connections.exchange import SILENT_LOGGER, DeadlineTimer, Exchange, Flow, Outgoing
from photon_grpc.gateway.connections.head import RequestHead, find_end, parse_head
from photon_grpc.gateway.connections.peer import has_reset, peer_of
from photon_grpc.gateway.connections.refusal import HttpRefusal, PartialRequest
from photon_grpc.gateway.connections.server_state import HttpServerState

#: Time until a client that closed its sending side is probed, and until it is first seen whether it reset.
_PROBE_S = 0.05
_LAST_PROBE_S = 5.0
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"


class HttpConnection(HttpToolsProtocol):
    """A connection. As `scope["extensions"]["photon.connection"]` the app sees it."""

    #: The peer as gRPC writes it: "ipv4:HOST:PORT", "ipv6:[HOST]:PORT" or "unix:".
    peer: str
    peer_host: str
    _flow: Flow

    def __init__(self, config: Config, state: HttpServerState) -> None:
        super().__init__(config, state, {})
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)
        self.logger = SILENT_LOGGER
        self.access_log = False
        self.is_ending = False
        self._state = state
        self._limits = state.limits
        self._unread = bytearray()
        #: Bytes of an incomplete head that have been searched for its end.
        self._searched = 0
        self._body: ArrivingBody | None = None
        self._refusal: HttpRefusal | None = None
        #: The head of the request that arrives or is answered, and since when it is here.
        self._head = b""
        self._head_since_s = 0.0
        self._place: Place | None = None
        self._arrival: asyncio.Task[Any] | None = None
        self._alarm = DeadlineTimer()
        self._lost_callbacks: list[Callable[[], None]] = []
        self._paused_before_s = 0.0
        self._idle_since_s = time.monotonic()
        self._is_open = self._is_lost = self._is_half_closed = False

    # What the app may use

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once if the client leaves before its answer is complete."""
        if self._is_lost or self.is_ending:
            self.loop.call_soon(callback)
        else:
            self._lost_callbacks.append(callback)

    def free_body(self) -> None:
        """Give back the memory that the body was counted with. It happens by itself when the answer begins."""
        if self._body is not None and self._body.is_complete:
            self._body.free()

    # Its place among the connections

    def idle_since_s(self) -> float | None:
        return None if self._is_answering() or self._is_receiving() else self._idle_since_s

    def evict(self, error: PhotonError) -> None:
        if self._is_open:
            self._close()
        elif self._arrival is not None:
            self._arrival.cancel()

    # From its beginning to its end

    def arrive(self, peername: Any) -> None:
        """Take a place; the running task makes the connection, with or without TLS. Raise QueueFull."""
        self.peer, self.peer_host = peer_of(peername)
        self._arrival = asyncio.current_task()
        self._place = self._state.places.take(self.peer_host, self)

    def leave(self) -> None:
        """Give the place back."""
        if self._place is not None:
            self._state.places.leave(self._place)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_open = True
        self.flow = self._flow = Flow(transport, self._limits)
        transport.set_write_buffer_limits(self._limits.max_unsent_bytes)
        self._alarm.set(self._limits.head_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = self.is_ending = True
        self._alarm.close()
        if self._is_open:
            self._flow.close()
        self.leave()
        self._free()
        super().connection_lost(exc)
        self._tell_lost()
        self._state.heed_departure()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Go on answering a client that only closed its sending side."""
        has_more = bool(self._unread) and not self._searched
        if self.is_ending or self.scheme == "https" or self._is_receiving() or not (self._is_answering() or has_more):
            return False
        self._is_half_closed = True
        self.loop.call_later(_PROBE_S, self._probe)
        return True

    def _probe(self) -> None:
        """Find out whether the client has left or waits, which looks the same: only a client that left resets."""
        is_silent = self._is_answering() and not self.cycle.response_started and not self.is_ending
        if is_silent and self.scope["http_version"] == "1.1":
            self.transport.write(_PROBE)
            self._heed_reset(_PROBE_S)

    def _heed_reset(self, delay_s: float) -> None:
        """Look for the reset of a near client at once, and for that of a distant one later."""
        if self._is_lost:
            return
        if has_reset(self.transport):
            self.transport.abort()
        elif delay_s < _LAST_PROBE_S:
            self.loop.call_later(delay_s, self._heed_reset, 2 * delay_s)

    # Reading

    def data_received(self, data: bytes) -> None:
        if self.is_ending:
            return
        self._unread += data
        self._read()

    def _read(self) -> None:
        try:
            while self._unread and not self.is_ending:
                if self._is_receiving():
                    self._read_body()
                elif self._is_answering():
                    self._hold_back()
                    return
                elif not self._read_head():
                    return
        except HttpRefusal as refusal:
            self.refuse(refusal)

    def _hold_back(self) -> None:
        """Keep what the client sends ahead; if that is too much, make the running answer the last one."""
        if len(self._unread) > self._limits.max_ahead_bytes:
            self._unread.clear()
            self.cycle.keep_alive = False
            self.flow.pause_reading()

    def _read_head(self) -> bool:
        """Begin the next request if its head is here."""
        if not self._searched:
            self._skip_empty_lines()
        if not self._unread or self._unread == b"\r":
            return False
        end = find_end(self._unread, self._searched, self._limits.head)
        if end < 0:
            if not self._searched and self.cycle is not None:
                self._alarm.set(self._limits.head_timeout_s, self._head_is_late)
            self._searched = len(self._unread)
            return False
        self._searched = 0
        raw = bytes(self._unread[:end])
        del self._unread[:end]
        self._head, self._head_since_s = raw, time.monotonic()
        self._begin(parse_head(raw, self._limits.head))
        return True

    def _skip_empty_lines(self) -> None:
        """Skip empty lines before a request, as RFC 9112 asks for."""
        while self._unread.startswith(b"\r\n"):
            del self._unread[:2]

    def _begin(self, head: RequestHead) -> None:
        length = head.content_length
        if length is not None and length > self._state.max_body_bytes:
            raise too_large(str(length), self._state.max_body_bytes)
        self._alarm.stop()
        if length != 0:
            self._body = ArrivingBody(length, self._limits, self._state.held, self.peer_host, self.refuse)
            self._paused_before_s = self._flow.paused_s()
            self._alarm.set(self._limits.body_timeout_s, self._check_body_time)
        self._parse(head.raw)

    def _read_body(self) -> None:
        body = cast(ArrivingBody, self._body)
        piece = bytes(self._unread if body.left is None else self._unread[: body.left])
        del self._unread[: len(piece)]
        body.count_raw(len(piece))
        self._parse(piece)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self._refusal is not None:
                raise self._refusal from None
            if self._is_receiving() or not self._is_answering():
                raise HttpRefusal(400, "MALFORMED_REQUEST", "the request's body or headers are malformed") from None
            # Bytes behind a chunked body: the request is whole, and its answer is the last one.
            self._unread.clear()
            self.cycle.keep_alive = False

    # What the parser finds

    def on_message_begin(self) -> None:
        if self._body is not None and self._body.is_complete:
            raise httptools.HttpParserError("a request behind a chunked body")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body is None or not self._body.num_raw_bytes:  # else it is a trailer, which nobody asked for
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._describe()
        self.cycle = Exchange(
            scope=self.scope,
            transport=cast(asyncio.Transport, Outgoing(self)),
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self._state.headers(),
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=self.scope["http_version"] == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle.connection = self
        self.cycle.errors = self._state.errors
        self._start_asgi_task(self.cycle, self.app)

    def _describe(self) -> None:
        path, _, query = self.url.partition(b"?")
        self.scope["http_version"] = self.parser.get_http_version()
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["raw_path"] = path
        self.scope["path"] = urllib.parse.unquote(path.decode("ascii"))
        self.scope["query_string"] = query
        self.scope["extensions"] = {"photon.connection": cast(Any, self)}

    def on_body(self, body: bytes) -> None:
        try:
            cast(ArrivingBody, self._body).grow(len(body), self._state.max_body_bytes)
        except HttpRefusal as refusal:
            self._refusal = refusal  # the parser would hide it
            raise
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._body is not None:
            self._body.is_complete = True
            self._alarm.stop()
        self.cycle.more_body = False
        self.cycle.message_event.set()

    # Answering

    def answer_starts(self, exchange: Exchange) -> None:
        self.free_body()
        if self._is_receiving() or self._state.is_draining:
            exchange.keep_alive = False

    def on_response_complete(self) -> None:
        self._state.total_requests += 1
        self._head = b""
        self._lost_callbacks.clear()
        self._free()
        if self.is_ending or self.transport.is_closing():
            return
        self._idle_since_s = time.monotonic()
        self._alarm.set(self._limits.idle_timeout_s, self._close)
        self.flow.resume_reading()
        if self._unread or self._is_half_closed:
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Begin the request that the client sent ahead."""
        self._read()
        if self._is_half_closed and not self.is_ending and (self._is_receiving() or not self._is_answering()):
            self._close()

    def refuse(self, refusal: HttpRefusal) -> None:
        """Answer the request that arrives with `refusal` and close."""
        if self.is_ending or self._is_lost:
            return
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        asked = PartialRequest.of_head(self._head, self._head_since_s) if self._head else PartialRequest()
        self.transport.write(self._state.refusals.response(refusal, asked, self._state.headers()))
        self._linger()
        self._tell_lost()

    # Deadlines

    def _head_is_late(self) -> None:
        if not self._unread:
            self._close()  # a connection that a browser opened in advance
            return
        limit_s = self._limits.head_timeout_s
        self.refuse(HttpRefusal(408, "REQUEST_TIMEOUT", f"the headers did not arrive within {limit_s:g} s"))

    def _check_body_time(self) -> None:
        body = cast(ArrivingBody, self._body)
        left_s = body.time_left_s(self._flow.paused_s() - self._paused_before_s)
        if left_s <= 0:
            self.refuse(body.too_late())
        else:
            self._alarm.set(left_s, self._check_body_time)

    # Closing

    def shutdown(self) -> None:
        """Close after the running answer, or now if there is none."""
        if self._is_answering():
            self.cycle.keep_alive = False
        elif not self._unread and not self.is_ending:
            self._close()

    def end(self) -> None:
        """Close after what has been written."""
        if self._is_receiving():
            self._linger()
        else:
            self._close()

    def _linger(self) -> None:
        """Stop answering, and read on for a while, so that the client's bytes do not reset what it has not read."""
        self.is_ending = True
        self._unread.clear()
        self._free()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._alarm.set(self._limits.linger_s, self._close)

    def _close(self) -> None:
        self.is_ending = True
        self.transport.close()  # waits for the client to read what is left
        if not self._is_lost:
            self._alarm.set(self._limits.stalled_timeout_s, self._cut_off)

    def _cut_off(self) -> None:
        if self.flow.write_paused:
            self._close()  # as long as the flow has patience
        else:
            self.transport.abort()

    # State

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.disconnected

    def _is_receiving(self) -> bool:
        return self._body is not None and not self._body.is_complete

    def _free(self) -> None:
        if self._body is not None:
            self._body.free()
            self._body = None

    def _tell_lost(self) -> None:
        callbacks, self._lost_callbacks = self._lost_callbacks, []
        for callback in callbacks:
            callback()
