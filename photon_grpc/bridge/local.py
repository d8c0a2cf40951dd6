"""The bridge within one program, between an engine in a thread and a front end on an event loop in another.

Frames are passed on without encoding.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable

from photon_grpc.core.frames import Down, Facts, Up
from photon_grpc.core.ports import Event
from photon_grpc.core.stats import Load
from photon_grpc.errors import EngineFailure


class LocalClient:
    """An implementation of core.ports.EngineLink. All calls run on the event loop `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, facts: Facts) -> None:
        self._loop = loop
        self._facts: Facts | None = facts
        self._down: queue.SimpleQueue[Down | Event | None] = queue.SimpleQueue()
        self._on_frame: Callable[[Up], None] = lambda frame: None
        self._on_lost: Callable[[], None] = lambda: None

    @property
    def facts(self) -> Facts | None:
        """The facts of the engine; None when it has ended."""
        return self._facts

    def listen(self, on_frame: Callable[[Up], None], on_lost: Callable[[], None]) -> None:
        self._on_frame, self._on_lost = on_frame, on_lost

    def send(self, frame: Down) -> None:
        """Send a frame. Raise EngineFailure when the engine has ended, since no supervisor starts another one."""
        if self._facts is None:
            raise EngineFailure("the engine has ended")
        self._down.put(frame)

    def received(self, frame: Up) -> None:
        """Pass on a frame of the engine; the first is its Facts."""
        self._on_frame(frame)

    def lost(self) -> None:
        """Note that the engine has ended."""
        if self._facts is not None:
            self._facts = None
            self._on_lost()

    def host(self) -> LocalHost:
        """Return the engine's end."""
        return LocalHost(self._loop, self._down, self)


class LocalHost:
    """An implementation of core.ports.Inbox and Outbox for the only front end, number 0.

    `drain` and `send` are called in the engine's thread.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, down: queue.SimpleQueue[Down | Event | None], client: LocalClient
    ) -> None:
        self._loop = loop
        self._down = down
        self._client = client

    def wake(self, event: Event) -> None:
        """Deliver an event, as in core.ports.Inbox."""
        self._down.put(event)

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down | Event]]:
        """Return what came, as in core.ports.Inbox. Raise EOFError after `close`."""
        frames: list[tuple[int, Down | Event]] = []
        try:
            frame = self._down.get(timeout=timeout_s) if timeout_s else self._down.get(block=timeout_s is None)
            while frame is not None:
                frames.append((-1 if isinstance(frame, Event) else 0, frame))
                frame = self._down.get_nowait()
        except queue.Empty:
            return frames
        raise EOFError("the program is done with its engine")

    def send(self, frontend: int, frame: Up) -> None:
        self._loop.call_soon_threadsafe(self._client.received, frame)

    def broadcast(self, load: Load) -> None:
        self.send(0, load)

    def lost(self) -> None:
        """Tell the front end that the engine has ended; from the engine's thread."""
        self._loop.call_soon_threadsafe(self._client.lost)

    def close(self) -> None:
        """Have the engine end at its next `drain`. Thread-safe."""
        self._down.put(None)
