"""Frames of HTTP/2 (RFC 9113) on a socket: what no gRPC client would send. Answers are read as frames; header blocks
stay packed."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_MAX_FRAME_BYTES = 1 << 24
#: Of a frame that is sent, before anybody allows more.
_FRAME_BYTES = 16_384
#: Of HPACK: the newest entry of the dynamic table, in one byte.
NEWEST_ENTRY = b"\xbe"


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends_stream(self) -> bool:
        return self.kind == RST_STREAM or (self.kind in (DATA, HEADERS) and bool(self.flags & END_STREAM))


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(path: str, content_type: str = "application/grpc", **more: str) -> bytes:
    """Of a call, every field a literal that is not indexed."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "127.0.0.1", "te": "trailers"}
    fields |= {"content-type": content_type} | {name.replace("_", "-"): value for name, value in more.items()}
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())


def new_entry(name: str, value: str) -> bytes:
    """A field that HPACK keeps in its dynamic table, of 4,096 bytes, names and values and 32 for each."""
    return b"\x40" + _text(name) + _text(value)


def headers(stream: int, block: bytes, flags: int = 0) -> bytes:
    """HEADERS and as many CONTINUATIONs as it takes."""
    first, *more = (block[at : at + _FRAME_BYTES] for at in range(0, len(block), _FRAME_BYTES))
    frames = [frame(HEADERS, flags | (0 if more else END_HEADERS), stream, first)]
    frames += [frame(CONTINUATION, 0, stream, piece) for piece in more[:-1]]
    return b"".join([*frames, *(frame(CONTINUATION, END_HEADERS, stream, piece) for piece in more[-1:])])


def _text(text: str) -> bytes:
    data = text.encode("latin-1")
    return _integer(len(data)) + data


def _integer(number: int) -> bytes:
    """With a prefix of seven bits."""
    if number < 127:
        return bytes((number,))
    number -= 127
    octets = [127]
    while number >= 128:
        octets.append(number % 128 + 128)
        number //= 128
    return bytes((*octets, number))


def grpc_message(data: bytes) -> bytes:
    """As it stands in DATA: not compressed, its length, itself."""
    return struct.pack(">BI", 0, len(data)) + data


class Connection:
    """One socket that has said its preface and SETTINGS. With a `window` of 0 the server may send no data."""

    def __init__(self, address: str, limit_s: float = 20.0, window: int = 65_535, source: str = "") -> None:
        """`source`: the address that it comes from."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), limit_s, (source, 0) if source else None)
        self._limit_s = limit_s
        self._unread = b""
        self.send(PREFACE + frame(SETTINGS, payload=struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)))

    def send(self, data: bytes) -> bool:
        """False where the server has closed: it may."""
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def call(self, stream: int, path: str, data: bytes | None, **headers: str) -> None:
        """HEADERS, and DATA where there is any; the last of them ends the stream."""
        flags = END_HEADERS | (END_STREAM if data is None else 0)
        self.send(frame(HEADERS, flags, stream, header_block(path, **headers)))
        if data is not None:
            self.send(frame(DATA, END_STREAM, stream, data))

    def open(self, stream: int, path: str, data: bytes = b"") -> None:
        """As `call`, with more to come."""
        opened = frame(HEADERS, END_HEADERS, stream, header_block(path))
        self.send(opened + (frame(DATA, 0, stream, data) if data else b""))

    def frames(self, *, is_polite: bool = True) -> Iterator[Frame]:
        """As they come, until the server closes; SETTINGS and PINGs are acknowledged by the polite. Raises
        TimeoutError."""
        until_s = time.monotonic() + self._limit_s
        while time.monotonic() < until_s:
            while (found := self._take()) is not None:
                if is_polite and found.kind in (SETTINGS, PING) and not found.flags & ACK:
                    self.send(frame(found.kind, ACK, 0, found.payload if found.kind == PING else b""))
                yield found
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                break
            except OSError:
                return
            if not data:
                return
            self._unread += data
        raise TimeoutError(f"nothing for {self._limit_s:g} s")

    def is_answered(self, stream: int) -> bool:
        """Return whether the stream is ended by the server, or the connection closed. False: neither, for as long as
        the limit."""
        try:
            for found in self.frames():
                if found.stream == stream and found.ends_stream:
                    return True
        except TimeoutError:
            return False
        return True

    def is_hung_up_on(self) -> bool:
        """Return whether the server closes. Until then PINGs are answered and SETTINGS are not; False: it does not, for
        as long as the limit."""
        try:
            for found in self.frames(is_polite=False):
                if found.kind == PING and not found.flags & ACK:
                    self.send(frame(PING, ACK, 0, found.payload))
        except TimeoutError:
            return False
        return True

    def vanish(self) -> None:
        """Closes with a reset: nothing is said any more."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _take(self) -> Frame | None:
        if len(self._unread) < 9:
            return None
        length = int.from_bytes(self._unread[:3], "big")
        assert length < _MAX_FRAME_BYTES
        if len(self._unread) < 9 + length:
            return None
        kind, flags, stream = struct.unpack(">BBI", self._unread[3:9])
        payload, self._unread = self._unread[9 : 9 + length], self._unread[9 + length :]
        return Frame(kind, flags, stream, payload)


@contextlib.contextmanager
def connected(address: str, limit_s: float = 20.0, window: int = 65_535, source: str = "") -> Iterator[Connection]:
    connection = Connection(address, limit_s, window, source)
    try:
        yield connection
    finally:
        connection.vanish()
