"""Bounds the frames that one turn of the engine's loop receives, so that steps go on however many wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from photon_grpc.core.frames import Abort, Add, Down
from photon_grpc.core.ports import Event, Inbox

#: Most frames and events of one turn, and most ids and handles in them. The frame that exceeds the latter is the last.
MAX_FRAMES, MAX_IDS = 64, 65_536


class Arrivals:
    """Received frames, in order.

    Args:
        inbox: is read again once all earlier frames were taken.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waiting: deque[tuple[int, Down | Event]] = deque()

    def __len__(self) -> int:
        """Frames that wait for the next turn."""
        return len(self._waiting)

    def take(self, timeout_s: float | None) -> Iterator[tuple[int, Down | Event]]:
        """Yield the frames of one turn. Raise EOFError when the other side of the bridge is gone.

        If none are left from the previous turn, wait as core.ports.Inbox.drain does.
        """
        if not self._waiting:
            self._waiting.extend(self._inbox.drain(timeout_s))
        num_ids = 0
        for _ in range(min(len(self._waiting), MAX_FRAMES)):
            taken = self._waiting.popleft()
            yield taken
            num_ids += _num_ids(taken[1])
            if num_ids >= MAX_IDS:
                return


def _num_ids(frame: Down | Event) -> int:
    if isinstance(frame, Add):
        return frame.request.num_given * max(frame.request.num_outputs, 1)
    return len(frame.handles) if isinstance(frame, Abort) else 0
