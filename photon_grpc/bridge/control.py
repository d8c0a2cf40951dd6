"""Messages between the supervisor and its children, over one socket pair per child.

The framing is that between front end and engine. A `Link` carries a socket (SCM_RIGHTS).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque

import msgspec

from photon_grpc.bridge.codec import FrameReader, encode
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.service_files import ServiceFile
from photon_grpc.core.counts import Series
from photon_grpc.core.frames import Facts
from photon_grpc.core.stats import Load

#: Room for the configuration and addresses; what one read takes.
_MAX_BYTES = 128 * 1024
#: The largest page. That of /metrics grows with front ends and label values.
MAX_PAGE_BYTES = 16 * 1024 * 1024
_MAX_SOCKETS = 16
#: Messages that may be unsent beyond what the socket holds. Each may hold a socket.
_MAX_UNSENT = 64


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """To a child, first of all: its role and configuration."""

    config: ServeConfig
    #: The front end's number.
    index: int = 0
    #: Where a front end listens.
    addresses: tuple[str, ...] = ()
    reuse_port: bool = False
    #: Where it serves AdminService; empty: nowhere.
    admin: str = ""
    #: Where it serves HTTP.
    http: tuple[str, ...] = ()
    #: The services that a front end serves beside ours.
    services: tuple[ServiceFile, ...] = ()


class Link(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """To a child: a socket to a new engine or front end comes along.

    Engines number front ends from 0 in this order.
    """

    #: The number of the engine's life.
    life: int = 0


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """To a front end: refuse new requests, wait up to `timeout_s` for running ones, then send Drained."""

    timeout_s: float


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """To a child: end now."""

    #: For front ends: requests of all front ends that still ran at the end of the drain.
    num_left: int = 0


class PageAnswer(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """To a front end: the page that it asked for by PageWanted with this number."""

    number: int
    #: HTTP's status code.
    status: int
    content_type: str
    body: bytes


class LoadingProgress(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """From the engine: the progress of loading."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """From the engine: it is ready to compute."""

    facts: Facts


class Bound(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """From a front end: where it listens, with the port numbers that the system chose."""

    addresses: tuple[str, ...]
    #: The model's name.
    model: str = ""
    #: Where it serves AdminService; empty: nowhere.
    admin: str = ""
    #: Where it serves HTTP.
    http: tuple[str, ...] = ()


class Serving(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """From a front end: whether requests are served (its readiness)."""

    is_serving: bool


class DrainWanted(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """From a front end: an operator wants the service to drain and end."""

    #: None for --drain-timeout.
    timeout_s: float | None = None


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=46):
    """From a front end: its drain has ended."""

    #: Requests that still ran when their time was over.
    num_left: int


class Counted(msgspec.Struct, frozen=True, array_like=True, tag=47):
    """From a front end: the series that changed since the last Counted, and the engine's newest Load and its `life`."""

    life: int
    load: Load
    series: tuple[Series, ...] = ()


class RequestsLost(msgspec.Struct, frozen=True, array_like=True, tag=48):
    """From the engine: a front end has died, and the requests that the engine ran for it are lost."""

    num_requests: int


class PageWanted(msgspec.Struct, frozen=True, array_like=True, tag=49):
    """From a front end: an HTTP caller asks for a page of the whole service, such as /metrics."""

    number: int
    path: str
    #: The value of its header Accept.
    accept: str


class CannotStart(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """From a child: the text of a StartupError; the child exits with code 2."""

    message: str


ControlMessage = (
    Begin
    | Link
    | Drain
    | Stop
    | PageAnswer
    | LoadingProgress
    | Ready
    | Bound
    | Serving
    | DrainWanted
    | Drained
    | Counted
    | RequestsLost
    | PageWanted
    | CannotStart
)
_DECODER: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


class _Unsent:
    """The unsent rest of a message, and the socket that is sent with its first byte."""

    def __init__(self, data: bytes, passed: socket.socket | None) -> None:
        self._rest = memoryview(data)
        self._passed = passed.dup() if passed is not None else None

    def send(self, sock: socket.socket) -> None:
        """Send all of it. Raise BlockingIOError after as much as there is room for, OSError when that fails."""
        while self._rest:
            fds = [self._passed.fileno()] if self._passed is not None else []
            self._rest = self._rest[socket.send_fds(sock, [self._rest], fds) :]
            self.close()

    def close(self) -> None:
        if self._passed is not None:
            self._passed.close()
            self._passed = None


class ControlChannel:
    """One end of a control socket.

    If the socket does not block, the running event loop sends what it does not take at once. A received message has at
    most `max_bytes`.
    """

    def __init__(self, sock: socket.socket, *, max_bytes: int = _MAX_BYTES) -> None:
        self._socket = sock
        self._unsent: deque[_Unsent] = deque()
        self._writing: asyncio.AbstractEventLoop | None = None
        self._reader = FrameReader(_DECODER, max_bytes=max_bytes)
        self._sockets: deque[int] = deque()

    def fileno(self) -> int:
        """Return the file descriptor; -1 when closed."""
        return self._socket.fileno()

    def set_blocking(self, blocking: bool) -> None:
        """Set whether `receive` waits."""
        self._socket.setblocking(blocking)

    def send(self, message: ControlMessage, passed: socket.socket | None = None) -> None:
        """Send one message, and a duplicate of `passed`, after the unsent ones.

        Raise BufferError if too many are unsent, OSError when the other end is gone.
        """
        if len(self._unsent) >= _MAX_UNSENT:
            raise BufferError(f"{len(self._unsent)} messages are unread; the limit is {_MAX_UNSENT}")
        self._unsent.append(_Unsent(encode(message), passed))
        if self._writing is None:
            self._flush()

    def receive(self) -> list[ControlMessage]:
        """Return the messages that came, and wait for one if the socket blocks. Raise EOFError at its end.

        `take_socket` returns the sockets of the Links in the list, in order.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, _MAX_SOCKETS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError("the control socket is broken") from error
        self._sockets.extend(fds)
        if not data:
            raise EOFError("the control socket is closed")
        return self._reader.feed(data)

    def take_socket(self) -> socket.socket:
        """Return the socket of the oldest Link not yet taken."""
        return socket.socket(fileno=self._sockets.popleft())

    def close(self) -> None:
        self._forget_unsent()
        self._socket.close()
        while self._sockets:
            self.take_socket().close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent[0].send(self._socket)
                self._unsent.popleft()
        except BlockingIOError:
            if self._writing is None:
                self._writing = asyncio.get_running_loop()
                self._writing.add_writer(self.fileno(), self._flush_later)
            return
        except OSError:
            self._forget_unsent()
            raise
        self._stop_writing()

    def _flush_later(self) -> None:
        # The end of the other side is noticed where its messages are read.
        with contextlib.suppress(OSError):
            self._flush()

    def _forget_unsent(self) -> None:
        self._stop_writing()
        for unsent in self._unsent:
            unsent.close()
        self._unsent.clear()

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.remove_writer(self.fileno())
            self._writing = None
