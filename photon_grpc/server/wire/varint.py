"""Numbers in wire form, see https://protobuf.dev/programming-guides/encoding#varints."""

from __future__ import annotations


def _written(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


_NUM_SHORT = 1 << 14
_SHORT = tuple([_written(value) for value in range(_NUM_SHORT)])


def varint(value: int) -> bytes:
    """Encode `value`, which is at least 0."""
    return _SHORT[value] if value < _NUM_SHORT else _written(value)
