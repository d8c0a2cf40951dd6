"""Delays the reuse of items that work in flight still touches."""

from __future__ import annotations


class Fences:
    """Tickets of work in flight: steps, copies and transfers. They close in any order.

    A fence is the newest ticket that touches an item. It is passed when every ticket up to it has closed. Ticket 0 was
    never open.
    """

    def __init__(self) -> None:
        self._newest = 0
        #: In order of opening.
        self._open: dict[int, None] = {}

    def open(self) -> int:
        """Return a ticket for new work, larger than all before it."""
        self._newest += 1
        self._open[self._newest] = None
        return self._newest

    def close(self, ticket: int) -> None:
        """Close the ticket of work that has ended. Raise KeyError if it is not open."""
        del self._open[ticket]

    @property
    def passed(self) -> int:
        """The newest ticket up to which none is open."""
        return next(iter(self._open), self._newest + 1) - 1


class Limbo:
    """Released items that may still be touched, each until its fence is passed."""

    def __init__(self, fences: Fences) -> None:
        self._fences = fences
        self._fence_of: dict[int, int] = {}
        self._waiting: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._fence_of)

    def __contains__(self, item: int) -> bool:
        return item in self._fence_of

    def put(self, item: int, fence: int) -> None:
        self._fence_of[item] = fence
        self._waiting.setdefault(fence, []).append(item)

    def take(self, item: int) -> int:
        """Take an item out before its fence is passed, for later work; return the fence, or 0 if it is not here."""
        return self._fence_of.pop(item, 0)

    def opened(self) -> list[int]:
        """Remove and return the items whose fence is passed."""
        if not self._waiting:
            return []
        passed = self._fences.passed
        opened = []
        for fence in [fence for fence in self._waiting if fence <= passed]:
            for item in self._waiting.pop(fence):
                # An item that was taken, and possibly put back, is still in this list.
                if self._fence_of.get(item) == fence:
                    del self._fence_of[item]
                    opened.append(item)
        return opened
