"""A front end's end of the bridge: an EngineLink on its event loop.

It outlives engines. Each engine is an epoch with its own socket, which the supervisor hands over. It does not know
requests: the listener fails those that were in flight when an engine is lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from photon_grpc.bridge.codec import UP, FrameError, FrameReader, encode
from photon_grpc.core.frames import Add, Down, Facts, Up
from photon_grpc.errors import RETRY_AFTER_S, EngineRestarting, ModelLoading, QueueFull

log = logging.getLogger(__name__)


class BridgeClient:
    """An implementation of core.ports.EngineLink over a socket. All calls run on one event loop."""

    def __init__(self, *, max_frame_bytes: int, max_backlog_bytes: int = 64 * 1024 * 1024) -> None:
        """Refuse an Add while more than `max_backlog_bytes` are unread.

        The backlog is therefore bounded by this plus one frame.
        """
        self._max_frame_bytes = max_frame_bytes
        self._max_backlog_bytes = max_backlog_bytes
        self._facts: Facts | None = None
        self._had_engine = False
        self._epoch: _Epoch | None = None
        self._on_frame: Callable[[Up], None] = lambda frame: None
        self._on_lost: Callable[[], None] = lambda: None

    @property
    def facts(self) -> Facts | None:
        """The facts of the engine; None while none is ready."""
        return self._facts

    def listen(self, on_frame: Callable[[Up], None], on_lost: Callable[[], None]) -> None:
        """Set the callbacks, as in core.ports.EngineLink. `facts` is set before `on_frame` gets the Facts."""
        self._on_frame = on_frame
        self._on_lost = on_lost

    def send(self, frame: Down) -> None:
        """Send a frame, in the order of calls.

        Raise EngineRestarting or ModelLoading when there is no engine, and QueueFull for an Add while too much is
        unread. An Abort is always sent: it is small, and there are at most as many as Adds.
        """
        if self._epoch is None or self._facts is None:
            raise self._absence()
        if isinstance(frame, Add) and (num_bytes := self._epoch.num_unread_bytes) > self._max_backlog_bytes:
            raise QueueFull(
                f"{num_bytes} bytes that the engine has not read exceed the limit of {self._max_backlog_bytes}",
                needed=num_bytes,
                limit=self._max_backlog_bytes,
                retry_after_s=RETRY_AFTER_S,
            )
        self._epoch.write(encode(frame))

    async def connect(self, sock: socket.socket) -> None:
        """Replace the engine by the newest one of the supervisor."""
        loop = asyncio.get_running_loop()
        epoch = _Epoch(loop, FrameReader(UP, max_bytes=self._max_frame_bytes), self._received, self._lost)
        self.close()
        self._epoch = epoch
        await loop.create_unix_connection(lambda: epoch, sock=sock)

    def close(self) -> None:
        """Disconnect from the engine, if there is one; it sees the end of the stream."""
        epoch = self._epoch
        if epoch is not None:
            epoch.close()
            self._lost(epoch)

    def _absence(self) -> EngineRestarting | ModelLoading:
        if self._had_engine:
            return EngineRestarting()
        return ModelLoading()

    def _received(self, epoch: _Epoch, frames: list[Up]) -> None:
        for frame in frames:
            if epoch is not self._epoch:
                return
            if isinstance(frame, Facts):
                self._facts = frame
                self._had_engine = True
            self._on_frame(frame)

    def _lost(self, epoch: _Epoch) -> None:
        if epoch is not self._epoch:
            return
        self._epoch = None
        was_ready = self._facts is not None
        self._facts = None
        if was_ready:
            self._on_lost()


class _Epoch(asyncio.BufferedProtocol):
    """The socket to one engine. Everything written in one turn of the loop leaves in one system call."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reader: FrameReader[Up],
        received: Callable[[_Epoch, list[Up]], None],
        lost: Callable[[_Epoch], None],
    ) -> None:
        self._loop = loop
        self._reader = reader
        self._received = received
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._unwritten: list[bytes] = []
        self._num_unwritten_bytes = 0
        self._is_closed = False

    @property
    def num_unread_bytes(self) -> int:
        """Bytes that the engine's socket has not taken."""
        buffered = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._num_unwritten_bytes + buffered

    def write(self, data: bytes) -> None:
        if not self._unwritten:
            self._loop.call_soon(self._flush)
        self._unwritten.append(data)
        self._num_unwritten_bytes += len(data)

    def close(self) -> None:
        self._is_closed = True
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport but are not subclasses.
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, num_bytes: int) -> None:
        try:
            frames = self._reader.advance(num_bytes)
        except FrameError as error:
            log.error("the engine sent invalid data: %s", error)
            if self._transport is not None:
                self._transport.abort()
            self._lost(self)
            return
        self._received(self, frames)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost(self)

    def _flush(self) -> None:
        if self._unwritten and self._transport is not None:
            self._transport.write(b"".join(self._unwritten))
        self._unwritten.clear()
        self._num_unwritten_bytes = 0
