"""The body of a request while it arrives: its size, its memory and its time."""

from __future__ import annotations

import time
from collections.abc import Callable

from photon_grpc.access.places import Place, Places
from photon_grpc.errors import PhotonError, QueueFull
from photon_grpc.gateway.connections.limits import ConnectionLimits
from photon_grpc.gateway.connections.refusal import HttpRefusal

#: A body takes its memory in pieces of at least this size.
_LEAST_HELD_BYTES = 16 * 1024
#: Bytes that chunk sizes and trailers may take beside a body: so many, and so many times the body.
_FRAMING_BYTES = 64 * 1024
_FRAMING_FACTOR = 8
_MIB = 2**20


class ArrivingBody:
    """A body, and the holder of its memory."""

    def __init__(
        self,
        length: int | None,
        limits: ConnectionLimits,
        places: Places,
        owner: str,
        refuse: Callable[[HttpRefusal], None],
    ) -> None:
        """Expect `length` bytes; None if the body is chunked. `refuse` ends the request if others need its memory."""
        #: Bytes that are still to come; None if it is chunked.
        self.left = length
        self.num_raw_bytes = 0
        self.is_complete = False
        self._num_bytes = 0
        self._limits = limits
        self._table = places
        self._owner = owner
        self._refuse = refuse
        self._places: list[Place] = []
        self._started_s = self._last_s = time.monotonic()

    def idle_since_s(self) -> float | None:
        return None if self.is_complete else self._last_s

    def evict(self, error: PhotonError) -> None:
        self._refuse(HttpRefusal.of(error))

    def count_raw(self, num_bytes: int) -> None:
        """Count bytes that are about to be parsed. Raise HttpRefusal if the chunks are mostly framing."""
        self.num_raw_bytes += num_bytes
        if self.left is not None:
            self.left -= num_bytes
        if self.num_raw_bytes - num_bytes > _FRAMING_BYTES + (1 + _FRAMING_FACTOR) * self._num_bytes:
            raise HttpRefusal(400, "MALFORMED_REQUEST", "the chunks of the body are too small; send larger ones")

    def grow(self, num_bytes: int, max_bytes: int) -> None:
        """Take memory for so many bytes more. Raise HttpRefusal."""
        self._num_bytes += num_bytes
        self._last_s = time.monotonic()
        if self._num_bytes > max_bytes:
            raise too_large(f"more than {max_bytes}", max_bytes)
        missing = self._num_bytes - sum(place.size for place in self._places)
        if missing > 0:
            try:
                self._places.append(self._table.take(self._owner, self, max(missing, _LEAST_HELD_BYTES)))
            except QueueFull as error:
                raise HttpRefusal.of(error) from None

    def free(self) -> None:
        for place in self._places:
            self._table.leave(place)
        self._places.clear()

    def time_left_s(self, paused_s: float) -> float:
        """Return the time in which the next bytes must arrive. Reading was paused for `paused_s`."""
        allowed_s = self._limits.body_timeout_s + self._num_bytes / _MIB * self._limits.body_timeout_s_per_mib
        return self._started_s + allowed_s + paused_s - time.monotonic()

    def too_late(self) -> HttpRefusal:
        text = (
            f"{self._num_bytes} bytes of the body arrived within {time.monotonic() - self._started_s:.0f} s; a body "
            f"may take {self._limits.body_timeout_s:g} s and {self._limits.body_timeout_s_per_mib:g} s per MiB"
        )
        return HttpRefusal(408, "REQUEST_TIMEOUT", text)


def too_large(size: str, max_bytes: int) -> HttpRefusal:
    text = f"the body has {size} bytes; the limit is {max_bytes}; send a smaller request"
    return HttpRefusal(413, "BODY_TOO_LARGE", text)
