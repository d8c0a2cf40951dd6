"""Bound the frames that one turn of the engine's loop takes in, so that a step follows however many wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from photon_grpc.core.frames import Abort, Add, Down
from photon_grpc.core.ports import Event, Inbox

#: Of one turn: frames and events, and ids and handles in them. The frame that exceeds the latter is its turn's last.
MAX_FRAMES, MAX_IDS = 64, 65_536


class Arrivals:
    """Frames in the order of their coming.

    Args:
        inbox: is read again once all that came before was taken in.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._left: deque[tuple[int, Down | Event]] = deque()

    def __len__(self) -> int:
        """Frames that wait for the next turn."""
        return len(self._left)

    def take(self, timeout_s: float | None) -> Iterator[tuple[int, Down | Event]]:
        """Yield a turn's share. Waits as core.ports.Inbox.drain where nothing is left from the turn before. Raise
        EOFError when the other side of the bridge is gone."""
        if not self._left:
            self._left.extend(self._inbox.drain(timeout_s))
        num_ids = 0
        for _ in range(min(len(self._left), MAX_FRAMES)):
            taken = self._left.popleft()
            yield taken
            num_ids += _num_ids(taken[1])
            if num_ids >= MAX_IDS:
                return


def _num_ids(frame: Down | Event) -> int:
    if isinstance(frame, Add):
        return frame.request.num_given * max(frame.request.num_outputs, 1)
    return len(frame.handles) if isinstance(frame, Abort) else 0
