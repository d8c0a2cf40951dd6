"""Ids that end an output, for a matcher that treats other ids as ends."""

from __future__ import annotations

from collections import defaultdict

#: The index of a byte in a bitmask, and bits of that byte.
_Place = tuple[int, int]


class EndIds:
    """Ids that may be sampled only where a grammar is satisfied.

    Args:
        ids: the ids that end the output.
        matcher_ids: the ids that the matcher treats as ends. It allows all of them where its grammar is satisfied or
            the matcher has failed, and otherwise what the grammar says.
    """

    def __init__(self, ids: tuple[int, ...], matcher_ids: tuple[int, ...]) -> None:
        self._ids = _places(ids)
        self._others = _places(tuple(set(matcher_ids) - set(ids)))
        #: If a mask of the matcher has none of these bits, the matcher has not failed and the mask needs no correction.
        #: Empty if masks do not show that.
        self.signs = _places(ids + matcher_ids) if matcher_ids else ()

    def holds(self, token_id: int) -> bool:
        """Return whether the id ends the output, or the matcher treats it as an end."""
        bits = 1 << (token_id & 7)
        return any(byte == token_id >> 3 and place & bits for byte, place in self._ids + self._others)

    def correct(self, mask: memoryview, is_satisfied: bool) -> None:
        """Allow all ends or none in a mask of the matcher."""
        for byte, bits in self._others:
            mask[byte] &= ~bits
        for byte, bits in self._ids:
            mask[byte] = mask[byte] | bits if is_satisfied else mask[byte] & ~bits


def _places(ids: tuple[int, ...]) -> tuple[_Place, ...]:
    """Return the places of the bits of these ids."""
    places: defaultdict[int, int] = defaultdict(int)
    for token_id in ids:
        places[token_id >> 3] |= 1 << (token_id & 7)
    return tuple(places.items())
