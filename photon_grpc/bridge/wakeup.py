"""Delivers events of other threads to a loop that waits on file descriptors."""

from __future__ import annotations

import socket
from collections import deque

from photon_grpc.core.ports import Event


class Wakeup:
    """A queue of events whose `fileno` is readable when it is not empty.

    `ring` may be called from any thread, `take` only from the loop's.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def ring(self, event: Event) -> None:
        """Add an event and wake the loop. Never waits, never raises."""
        self._events.append(event)
        try:
            self._writer.send(b"\0")
        except OSError:
            # If it is full, it is readable already; if it is closed, the loop is gone.
            return

    def take(self) -> list[Event]:
        """Return the events so far. Each event is added before its byte is written, so none is missed."""
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
