"""Ids that end an output, for a matcher that takes others for ends."""

from __future__ import annotations

from collections import defaultdict

#: A byte of a bitmask, and bits of it.
_Place = tuple[int, int]


class Ends:
    """Ids that may be drawn where a grammar is satisfied, and nowhere else.

    Args:
        ids: end the output.
        matcher_ids: the matcher takes them for ends: it allows them all where its grammar is satisfied and where it has
            failed, and elsewhere what the grammar says.
    """

    def __init__(self, ids: tuple[int, ...], matcher_ids: tuple[int, ...]) -> None:
        self._ids = _places(ids)
        self._others = _places(tuple(set(matcher_ids) - set(ids)))
        #: Where a mask of the matcher has none of these bits it has not failed, and nothing is to be corrected. Empty
        #: where its masks do not tell.
        self.signs = _places(ids + matcher_ids) if matcher_ids else ()

    def holds(self, token_id: int) -> bool:
        """Return whether the id ends the output, or the matcher takes it for an end."""
        bits = 1 << (token_id & 7)
        return any(byte == token_id >> 3 and place & bits for byte, place in self._ids + self._others)

    def correct(self, mask: memoryview, is_satisfied: bool) -> None:
        """Allow the ends or none of them, in a mask of the matcher."""
        for byte, bits in self._others:
            mask[byte] &= ~bits
        for byte, bits in self._ids:
            mask[byte] = mask[byte] | bits if is_satisfied else mask[byte] & ~bits


def _places(ids: tuple[int, ...]) -> tuple[_Place, ...]:
    """Where the bits of these ids lie."""
    places: defaultdict[int, int] = defaultdict(int)
    for token_id in ids:
        places[token_id >> 3] |= 1 << (token_id & 7)
    return tuple(places.items())
