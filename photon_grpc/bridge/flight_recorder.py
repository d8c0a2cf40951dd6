"""A record of the steps in flight, in memory that the engine shares with its supervisor.

It shows the next engine what was being computed when the last one died. Requests are identified by their fingerprints.
Nothing is sent or waited for: a step costs one small write, and so does an admission.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from typing import NamedTuple

from photon_grpc.bridge.heartbeat import shared_file

#: Steps that are remembered, more than are ever in flight.
_NUM_STEPS = 8
#: Most rows of a step, and slots of an engine. Pages that are never written take no memory.
_MAX_ROWS = 1 << 16
_MAX_KNOWN_BYTES = 1 << 20

_FINGERPRINT_BYTES = 16
_NO_FINGERPRINT = bytes(_FINGERPRINT_BYTES)
_NONE_IN_FLIGHT = 2**64 - 1

#: The newest step that was read, the size of the stored data, the request that is being received.
_HEAD = struct.Struct(f"@QQ{_FINGERPRINT_BYTES}s")
_SETTLED, _NUM_KNOWN, _RECEIVING = 0, 1, slice(16, 16 + _FINGERPRINT_BYTES)
#: A step and its number of rows; their slots follow.
_STEP = struct.Struct("@QQ")
#: The fingerprint of a slot's request, and `since_step` (core.ports.FlightRecorder.admitted).
_SLOT = struct.Struct(f"@{_FINGERPRINT_BYTES}sq")
_SLOT_BYTES = 4

_STEPS_AT = 64
_STEP_BYTES = _STEP.size + _SLOT_BYTES * _MAX_ROWS
_SLOTS_AT = _STEPS_AT + _NUM_STEPS * _STEP_BYTES
_KNOWN_AT = _SLOTS_AT + _SLOT.size * _MAX_ROWS
_NUM_BYTES = _KNOWN_AT + _MAX_KNOWN_BYTES


class LastFlight(NamedTuple):
    """The record that an engine left behind, as the next one finds it."""

    #: Fingerprint -> most tokens that its output can have had. The requests of all unread steps, or only the one that
    #: was being received.
    suspects: dict[bytes, int]
    #: What was passed to `remember`.
    known: bytes


class SharedFlightRecorder:
    """An implementation of core.ports.FlightRecorder over the file descriptor that the engine got."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _NUM_BYTES)
        self._page = mmap.mmap(fd, _NUM_BYTES)
        os.close(fd)
        self._bytes = memoryview(self._page)
        #: Writing a number is atomic.
        self._numbers = self._bytes.cast("Q")
        #: The slots stored in each place for a step.
        self._slots: list[tuple[int, ...]] = [()] * _NUM_STEPS
        self.last = _last_flight(self._page)
        self._forget_steps()

    def receiving(self, fingerprint: bytes) -> None:
        self._page[_RECEIVING] = fingerprint

    def received(self) -> None:
        self._page[_RECEIVING] = _NO_FINGERPRINT

    def admitted(self, slot: int, since_step: int, fingerprint: bytes) -> None:
        if slot < _MAX_ROWS:
            _SLOT.pack_into(self._page, _SLOTS_AT + slot * _SLOT.size, fingerprint, since_step)

    def launching(self, step: int, slots: tuple[int, ...]) -> None:
        place = step % _NUM_STEPS
        at = _STEPS_AT + place * _STEP_BYTES
        if slots != self._slots[place]:
            # Steps mostly have the same rows, so this is rarely written.
            rows = memoryview(array("I", slots[:_MAX_ROWS])).cast("B")
            begin = at + _STEP.size
            self._bytes[begin : begin + len(rows)] = rows
            self._numbers[at // 8 + 1] = len(rows) // _SLOT_BYTES
            self._slots[place] = slots
        self._numbers[at // 8] = step

    def settled(self, step: int) -> None:
        self._numbers[_SETTLED] = step

    def remember(self, known: bytes) -> None:
        if len(known) > _MAX_KNOWN_BYTES:
            raise ValueError(
                f"{len(known)} bytes exceed the limit of {_MAX_KNOWN_BYTES} that the flight recorder can store"
            )
        self._numbers[_NUM_KNOWN] = 0
        self._page[_KNOWN_AT : _KNOWN_AT + len(known)] = known
        # Written last, so that an engine that dies meanwhile leaves nothing rather than a part.
        self._numbers[_NUM_KNOWN] = len(known)

    def _forget_steps(self) -> None:
        for place in range(_NUM_STEPS):
            _STEP.pack_into(self._page, _STEPS_AT + place * _STEP_BYTES, 0, 0)
        self.received()
        self.settled(0)


class FlightRecord:
    """The supervisor's end: the memory, which outlives every engine."""

    def __init__(self) -> None:
        self.fd = shared_file("flight")
        os.ftruncate(self.fd, _NUM_BYTES)

    def absolve(self) -> None:
        """Clear the requests of the last engine, which did not cause its end."""
        os.pwrite(self.fd, struct.pack("@Q", _NONE_IN_FLIGHT), 8 * _SETTLED)
        os.pwrite(self.fd, _NO_FINGERPRINT, _RECEIVING.start)

    def close(self) -> None:
        """Free the memory; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _last_flight(page: mmap.mmap) -> LastFlight:
    settled, num_known_bytes, receiving = _HEAD.unpack_from(page, 0)
    known = page[_KNOWN_AT : _KNOWN_AT + num_known_bytes]
    if receiving != _NO_FINGERPRINT:
        return LastFlight({receiving: 0}, known)
    suspects: dict[bytes, int] = {}
    for place in range(_NUM_STEPS):
        at = _STEPS_AT + place * _STEP_BYTES
        step, num_rows = _STEP.unpack_from(page, at)
        if step <= settled:
            continue
        for slot in array("I", page[at + _STEP.size : at + _STEP.size + _SLOT_BYTES * num_rows]):
            if slot < _MAX_ROWS:
                fingerprint, since_step = _SLOT.unpack_from(page, _SLOTS_AT + slot * _SLOT.size)
                suspects[fingerprint] = max(suspects.get(fingerprint, 0), step - since_step)
    return LastFlight(suspects, known)
