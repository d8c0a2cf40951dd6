"""The steps in flight, in memory that the engine shares with its supervisor: what was being computed when an engine
died is there for the next one.

A request is known by its fingerprint. Nothing here is sent or waited for; a step costs one small write, a seat another.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from typing import NamedTuple

from photon_grpc.bridge.heartbeat import shared_file

#: Steps that are remembered: more than are ever in flight.
_NUM_STEPS = 8
#: Rows of a step, seats of an engine. The memory is sparse: what is never written takes none.
_MAX_ROWS = 1 << 16
_MAX_KNOWN_BYTES = 1 << 20

_FINGERPRINT_BYTES = 16
_NO_FINGERPRINT = bytes(_FINGERPRINT_BYTES)
_NONE_IN_FLIGHT = 2**64 - 1

#: The newest step that was read, bytes of what is known, the request that is being taken in.
_HEAD = struct.Struct(f"@QQ{_FINGERPRINT_BYTES}s")
_SETTLED, _NUM_KNOWN, _RECEIVING = 0, 1, slice(16, 16 + _FINGERPRINT_BYTES)
#: A step and its rows; their seats follow.
_STEP = struct.Struct("@QQ")
#: Who has a seat, and a step before its output's first token.
_SEAT = struct.Struct(f"@{_FINGERPRINT_BYTES}sq")
_SLOT_BYTES = 4

_STEPS_AT = 64
_STEP_BYTES = _STEP.size + _SLOT_BYTES * _MAX_ROWS
_SEATS_AT = _STEPS_AT + _NUM_STEPS * _STEP_BYTES
_KNOWN_AT = _SEATS_AT + _SEAT.size * _MAX_ROWS
_NUM_BYTES = _KNOWN_AT + _MAX_KNOWN_BYTES


class LastFlight(NamedTuple):
    """An engine's end, as the next one finds it."""

    #: Fingerprint -> tokens of its output at most, of every request in a step that was not read; of the one
    #: alone that was being taken in.
    suspects: dict[bytes, int]
    #: As `remember` got it.
    known: bytes


class SharedFlightRecorder:
    """core.ports.FlightRecorder over the file descriptor that the engine was given."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _NUM_BYTES)
        self._page = mmap.mmap(fd, _NUM_BYTES)
        os.close(fd)
        self._bytes = memoryview(self._page)
        #: A number is stored at once.
        self._numbers = self._bytes.cast("Q")
        #: What stands in the place of each step.
        self._slots: list[tuple[int, ...]] = [()] * _NUM_STEPS
        self.last = _last_flight(self._page)
        self._forget_steps()

    def receiving(self, fingerprint: bytes) -> None:
        self._page[_RECEIVING] = fingerprint

    def received(self) -> None:
        self._page[_RECEIVING] = _NO_FINGERPRINT

    def admitted(self, slot: int, since_step: int, fingerprint: bytes) -> None:
        if slot < _MAX_ROWS:
            _SEAT.pack_into(self._page, _SEATS_AT + slot * _SEAT.size, fingerprint, since_step)

    def launching(self, step: int, slots: tuple[int, ...]) -> None:
        place = step % _NUM_STEPS
        at = _STEPS_AT + place * _STEP_BYTES
        if slots != self._slots[place]:
            # Rows of a step are mostly those of the one before.
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
            raise ValueError(f"{len(known)} bytes are to be remembered, there is room for {_MAX_KNOWN_BYTES}")
        self._numbers[_NUM_KNOWN] = 0
        self._page[_KNOWN_AT : _KNOWN_AT + len(known)] = known
        # Last: an engine that dies meanwhile leaves nothing rather than half.
        self._numbers[_NUM_KNOWN] = len(known)

    def _forget_steps(self) -> None:
        for place in range(_NUM_STEPS):
            _STEP.pack_into(self._page, _STEPS_AT + place * _STEP_BYTES, 0, 0)
        self.received()
        self.settled(0)


class FlightRecord:
    """The supervisor's end: the memory itself, which outlives every engine."""

    def __init__(self) -> None:
        self.fd = shared_file("flight")
        os.ftruncate(self.fd, _NUM_BYTES)

    def absolve(self) -> None:
        """The engine's end was no fault of what it computed."""
        os.pwrite(self.fd, struct.pack("@Q", _NONE_IN_FLIGHT), 8 * _SETTLED)
        os.pwrite(self.fd, _NO_FINGERPRINT, _RECEIVING.start)

    def close(self) -> None:
        """Idempotent."""
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
                fingerprint, since_step = _SEAT.unpack_from(page, _SEATS_AT + slot * _SEAT.size)
                suspects[fingerprint] = max(suspects.get(fingerprint, 0), step - since_step)
    return LastFlight(suspects, known)
