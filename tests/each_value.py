"""A few of the cases of a test that have every value of every parameter."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

#: The parameters of one case.
Values = frozenset[tuple[str, Hashable]]


def each_value(cases: Sequence[Values]) -> set[int]:
    """Return the numbers of a few cases that together have every value of every parameter."""
    chosen: set[int] = set()
    missing = set[tuple[str, Hashable]]().union(*cases)
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(cases[number] & missing), -number))
        chosen.add(best)
        missing -= cases[best]
    return chosen
