"""Messages between the supervisor and its children, over one socket pair per child.

Framed as between front end and engine; a `Link` brings a socket with it (SCM_RIGHTS).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque

import msgspec

from photon_grpc.bridge.codec import FrameReader, encode
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.counts import Series
from photon_grpc.core.frames import Facts
from photon_grpc.core.stats import Load

#: Configuration and addresses.
_MAX_BYTES = 128 * 1024
_MAX_SOCKETS = 16
#: Messages that wait for one who does not read, beyond what the socket holds. Each may hold a socket.
_MAX_UNSENT = 64


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """To a child, first of all: what to be."""

    config: ServeConfig
    #: The front end's number.
    index: int = 0
    #: Where a front end listens.
    addresses: tuple[str, ...] = ()
    reuse_port: bool = False
    #: Where it serves AdminService; empty: nowhere.
    admin: str = ""


class Link(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """To a child: the socket that comes along leads to a new engine, or to a new front end, which engines number from 0
    in this order."""

    #: The number of the engine's life.
    life: int = 0


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """To a front end: refuse new requests, give running ones so long, then say Drained."""

    timeout_s: float


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """To a child: end now."""

    #: To front ends: requests of all of them that still ran at the end of the drain.
    num_left: int = 0


class LoadingProgress(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """From the engine: how far loading is."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """From the engine: it can compute."""

    facts: Facts


class Bound(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """From a front end: where it listens, with the port numbers that the system chose."""

    addresses: tuple[str, ...]
    #: The model's name.
    model: str = ""
    #: Where it serves AdminService; empty: nowhere.
    admin: str = ""


class Serving(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """From a front end: whether requests are served (its readiness)."""

    is_serving: bool


class DrainWanted(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """From a front end: an operator wants the service to drain and end."""

    #: None: --drain-timeout.
    timeout_s: float | None = None


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=46):
    """From a front end: nothing runs any more."""

    #: Requests that still ran when their time was over.
    num_left: int


class Counted(msgspec.Struct, frozen=True, array_like=True, tag=47):
    """From a front end: what it has counted since it was last told, and the engine's newest Load in its `life`."""

    life: int
    load: Load
    series: tuple[Series, ...] = ()


class RequestsLost(msgspec.Struct, frozen=True, array_like=True, tag=48):
    """From the engine: a front end has died, and with it the requests that the engine ran for it."""

    num_requests: int


class CannotStart(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """From a child: a StartupError, for people; it ends with exit code 2."""

    message: str


ControlMessage = (
    Begin
    | Link
    | Drain
    | Stop
    | LoadingProgress
    | Ready
    | Bound
    | Serving
    | DrainWanted
    | Drained
    | Counted
    | RequestsLost
    | CannotStart
)
_DECODER: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


class _Unsent:
    """The unsent rest of a message, and the socket that leaves with its first byte."""

    def __init__(self, data: bytes, passed: socket.socket | None) -> None:
        self._rest = memoryview(data)
        self._passed = passed.dup() if passed is not None else None

    def send(self, sock: socket.socket) -> None:
        """All of it, or as much as there is room for: then raises BlockingIOError. Raise OSError."""
        while self._rest:
            fds = [self._passed.fileno()] if self._passed is not None else []
            self._rest = self._rest[socket.send_fds(sock, [self._rest], fds) :]
            self.close()

    def close(self) -> None:
        if self._passed is not None:
            self._passed.close()
            self._passed = None


class ControlChannel:
    """One end of a control socket. Where that does not block, what it does not take at once is sent by the running
    event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unsent: deque[_Unsent] = deque()
        self._writing: asyncio.AbstractEventLoop | None = None
        self._reader = FrameReader(_DECODER, max_bytes=_MAX_BYTES)
        self._sockets: deque[int] = deque()

    def fileno(self) -> int:
        """-1 when closed."""
        return self._socket.fileno()

    def set_blocking(self, blocking: bool) -> None:
        """Return whether `receive` waits."""
        self._socket.setblocking(blocking)

    def send(self, message: ControlMessage, passed: socket.socket | None = None) -> None:
        """Send one message, and a duplicate of `passed`, after those that wait.

        Raise BufferError where too many wait, OSError when the other end is gone.
        """
        if len(self._unsent) >= _MAX_UNSENT:
            raise BufferError(f"{len(self._unsent)} messages are not read")
        self._unsent.append(_Unsent(encode(message), passed))
        if self._writing is None:
            self._flush()

    def receive(self) -> list[ControlMessage]:
        """Receive messages: wait where the socket blocks, else possibly none. Raise EOFError when the other end is
        gone.

        The socket of each Link in the list waits in `take_socket`, in order.
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
        # One that is gone is missed where its messages are read.
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
