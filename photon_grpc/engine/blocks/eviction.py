"""The order in which unused cached blocks are evicted: least recently used first, those of sessions later.

Sessions are preferred as long as their blocks are at most half of the known ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

#: A session's block is evicted before a plain one that became unused this many times the number of known blocks later,
#: so that a session that never comes back loses its blocks in the end.
_SESSION_ROUNDS = 8


class EvictionOrder:
    """Least recently used blocks first, but blocks that a session has used count as used later."""

    def __init__(self) -> None:
        #: Block -> the turn in which it became unused, in order of turns.
        self._plain: OrderedDict[int, int] = OrderedDict()
        self._of_sessions: OrderedDict[int, int] = OrderedDict()
        self._kept: set[int] = set()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._of_sessions)

    def keep(self, blocks: Iterable[int]) -> None:
        """Prefer these blocks, which a session uses, until `forget`."""
        self._kept.update(blocks)

    def forget(self, block: int) -> None:
        """Remove a block whose content is no longer known."""
        self.remove(block)
        self._kept.discard(block)

    def add(self, block: int) -> None:
        self._turn += 1
        (self._of_sessions if block in self._kept else self._plain)[block] = self._turn

    def remove(self, block: int) -> None:
        self._plain.pop(block, None)
        self._of_sessions.pop(block, None)

    def first(self, num_known: int) -> int:
        """Return the block to evict next, of `num_known` known blocks. Raise KeyError if none is unused."""
        if not len(self):
            raise KeyError("no block is unused")
        turns = self._of_sessions if self._goes_to_session(num_known) else self._plain
        return next(iter(turns))

    def _goes_to_session(self, num_known: int) -> bool:
        """Return whether the next block to evict is one of a session."""
        if not (self._plain and self._of_sessions):
            return not self._plain
        if 2 * len(self._of_sessions) > num_known:
            return True
        plain, kept = (next(iter(turns.values())) for turns in (self._plain, self._of_sessions))
        return kept + _SESSION_ROUNDS * num_known < plain
