"""Frames on a stream socket: a length of four bytes (little-endian), then msgpack.

Both ends are our own processes. Bytes that are not a frame are a defect or come from a foreign writer: they raise
`FrameError`, and the connection ends.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from photon_grpc.core.frames import Down, Up

T = TypeVar("T")

_HEADER = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
#: Initial size of the buffer, and its size between bursts.
_BUFFER_BYTES = 64 * 1024
#: Longest frame of a step: a quarter of a million positions with log-probabilities of 1 KiB each.
MAX_STEP_BYTES = 256 * 1024 * 1024
#: A buffer that has grown beyond this for one long prompt is freed when it is empty.
_KEPT_BYTES = 1024 * 1024

DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


class FrameError(Exception):
    """A connection carried bytes that are not a frame."""


def max_frame_bytes(max_message_bytes: int) -> int:
    """Return the longest frame that a message of `max_message_bytes` can become.

    A token id takes at least one byte in a message and at most five in a frame.
    """
    return 5 * max_message_bytes + 64 * 1024


def encode(frame: Any) -> bytes:
    """Return the bytes of one frame, length first."""
    body = _ENCODER.encode(frame)
    return _HEADER.pack(len(body)) + body


class FrameReader(Generic[T]):
    """Turns a stream of bytes, in pieces of any size, into frames.

    The caller receives into `room()` and passes the number of bytes to `advance`. Only the tail of an unfinished frame
    is copied.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], *, max_bytes: int) -> None:
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._end = 0

    def room(self) -> memoryview:
        """Return the space for the next bytes; never empty."""
        return self._view[self._end :]

    def advance(self, num_bytes: int) -> list[T]:
        """Return the frames that `num_bytes` more bytes complete, in order. Raise FrameError."""
        self._end += num_bytes
        frames: list[T] = []
        start = 0
        needed = _HEADER.size
        while self._end - start >= _HEADER.size:
            needed = self._frame_bytes(start)
            if self._end - start < needed:
                break
            frames.append(self._decode(self._view[start + _HEADER.size : start + needed]))
            start += needed
            needed = _HEADER.size
        self._keep(start, needed)
        return frames

    def feed(self, data: bytes | bytearray | memoryview) -> list[T]:
        """Return the frames that bytes in another buffer complete, as with `room` and `advance`. Raise FrameError."""
        frames: list[T] = []
        rest = memoryview(data)
        while len(rest):
            room = self.room()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            frames += self.advance(count)
            rest = rest[count:]
        return frames

    @property
    def is_partial(self) -> bool:
        """Whether a frame has begun and not ended; at the end of the stream that means data was lost."""
        return self._end > 0

    def _frame_bytes(self, start: int) -> int:
        length: int = _HEADER.unpack_from(self._buffer, start)[0]
        if length > self._max_bytes:
            raise FrameError(f"a frame of {length} bytes exceeds the limit of {self._max_bytes}")
        return _HEADER.size + length

    def _decode(self, body: memoryview) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FrameError(f"{len(body)} bytes are not a frame: {error}") from error

    def _keep(self, start: int, needed: int) -> None:
        """Move the unfinished frame to the front of a buffer that has room for all of it (`needed` bytes)."""
        rest = self._view[start : self._end]
        capacity = len(self._buffer)
        if needed > capacity:
            capacity = needed
        elif capacity > _KEPT_BYTES and needed <= _BUFFER_BYTES:
            capacity = _BUFFER_BYTES
        if capacity != len(self._buffer):
            self._buffer = bytearray(capacity)
            self._view = memoryview(self._buffer)
        self._end = len(rest)
        self._view[: self._end] = rest
