"""What the supervisor and its children tell one another, over one socket pair per child.

The same frames as between front end and engine; a `Link` brings a socket with it (SCM_RIGHTS).
"""

from __future__ import annotations

import socket
from collections import deque

import msgspec

from photon_grpc.bridge.codec import FrameReader, encode
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.frames import Facts

#: Configuration and addresses; far below what a socket buffer takes at once.
_MAX_BYTES = 128 * 1024
_MAX_SOCKETS = 16


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """To a child, first of all: what to be."""

    config: ServeConfig
    #: Which front end.
    index: int = 0
    #: Where a front end listens.
    addresses: tuple[str, ...] = ()
    reuse_port: bool = False


class Link(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """To a child: the socket that comes along leads to a new engine, or to a new front end."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """To a front end: refuse new requests, give running ones so long, then end."""

    timeout_s: float


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """To the engine: end now."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=40):
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


class Serving(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """From a front end: whether requests are served (its readiness)."""

    is_serving: bool


class CannotStart(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """From a child: a StartupError, for people; it ends with exit code 2."""

    message: str


ControlMessage = Begin | Link | Drain | Stop | Progress | Ready | Bound | Serving | CannotStart
_DECODER: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


class ControlChannel:
    """One end of a control socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader(_DECODER, max_bytes=_MAX_BYTES)
        self._sockets: deque[int] = deque()

    def fileno(self) -> int:
        """-1 when closed."""
        return self._socket.fileno()

    def set_blocking(self, blocking: bool) -> None:
        """Whether `receive` waits."""
        self._socket.setblocking(blocking)

    def send(self, message: ControlMessage, passed: socket.socket | None = None) -> None:
        """Sends one message, and a duplicate of `passed`. Raises OSError when the other end is gone or does not read."""
        data = encode(message)
        sent = socket.send_fds(self._socket, [data], [passed.fileno()]) if passed else self._socket.send(data)
        if sent != len(data):
            raise BlockingIOError(f"the control socket took {sent} of {len(data)} bytes")

    def receive(self) -> list[ControlMessage]:
        """What came; waits where the socket blocks, else may be empty. Raises EOFError when the other end is gone.

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
        """The socket of the oldest Link not yet taken."""
        return socket.socket(fileno=self._sockets.popleft())

    def close(self) -> None:
        self._socket.close()
        while self._sockets:
            self.take_socket().close()
