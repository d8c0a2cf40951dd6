"""The order in which blocks at rest are evicted: the one that rested longest first, those of sessions later, as long
as they are no more than half of what is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

#: A block of a session goes before one of none that came to rest so many times the number of known blocks later: a
#: session that never comes back keeps nothing for ever.
_SESSION_ROUNDS = 8


class EvictionOrder:
    """Least recently used first. Blocks that a session has used rest as if they had come later."""

    def __init__(self) -> None:
        #: Block -> its turn; each in the order of turns.
        self._plain: OrderedDict[int, int] = OrderedDict()
        self._of_sessions: OrderedDict[int, int] = OrderedDict()
        self._kept: set[int] = set()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._of_sessions)

    def keep(self, blocks: Iterable[int]) -> None:
        """A session uses these blocks; until `forget`."""
        self._kept.update(blocks)

    def forget(self, block: int) -> None:
        """Its content is not known any more; it does not rest either."""
        self.remove(block)
        self._kept.discard(block)

    def add(self, block: int) -> None:
        self._turn += 1
        (self._of_sessions if block in self._kept else self._plain)[block] = self._turn

    def remove(self, block: int) -> None:
        self._plain.pop(block, None)
        self._of_sessions.pop(block, None)

    def first(self, num_known: int) -> int:
        """Return the block to go next, of `num_known` whose content is known. Raise KeyError when none rests."""
        if not len(self):
            raise KeyError("no block rests")
        turns = self._of_sessions if self._goes_to_session(num_known) else self._plain
        return next(iter(turns))

    def _goes_to_session(self, num_known: int) -> bool:
        """Return whether the turn is at a block of a session."""
        if not (self._plain and self._of_sessions):
            return not self._plain
        if 2 * len(self._of_sessions) > num_known:
            return True
        plain, kept = (next(iter(turns.values())) for turns in (self._plain, self._of_sessions))
        return kept + _SESSION_ROUNDS * num_known < plain
