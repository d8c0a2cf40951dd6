"""Bounds the frames that one turn of the engine's loop receives, so that steps go on however many wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from photon_grpc.core.frames import Abort, Add, Down
from photon_grpc.core.ports import Event, Inbox

#: Most frames and events of one turn, most ids in them; the frame that exceeds the latter is the last. An abort is no
#: frame and so many ids: a call that is cancelled with a thousand requests leaves the engine in one turn.
MAX_FRAMES, MAX_IDS, IDS_PER_ABORT = 64, 65_536, 64


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
        num_frames = num_ids = 0
        while self._waiting and num_frames < MAX_FRAMES and num_ids < MAX_IDS:
            taken = self._waiting.popleft()
            yield taken
            num_frames += not isinstance(taken[1], Abort)
            num_ids += _num_ids(taken[1])


def _num_ids(frame: Down | Event) -> int:
    if isinstance(frame, Add):
        return frame.request.num_given * max(frame.request.num_outputs, 1)
    return IDS_PER_ABORT * len(frame.handles) if isinstance(frame, Abort) else 0
