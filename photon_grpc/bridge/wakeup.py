"""Events of other threads, for a loop that waits on file descriptors."""

from __future__ import annotations

import socket
from collections import deque

from photon_grpc.core.ports import Event


class Wakeup:
    """`ring` from any thread makes `fileno` readable; `take` belongs to the loop's thread."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def ring(self, event: Event) -> None:
        """Never waits, never raises."""
        self._events.append(event)
        try:
            self._writer.send(b"\0")
        except OSError:
            # Full: it is readable already. Closed: the loop is gone.
            return

    def take(self) -> list[Event]:
        """Return the events so far. An event whose byte comes later is there with it at the latest."""
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
