"""Items that may not be given away yet, because work in flight still touches them."""

from __future__ import annotations


class Fences:
    """Tickets of work in flight: steps, copies and transfers alike. They close in any order.

    A fence is the newest ticket that touches something; it is passed when every ticket up to it has closed. Ticket 0
    was never open.
    """

    def __init__(self) -> None:
        self._newest = 0
        #: In order of opening.
        self._open: dict[int, None] = {}

    def open(self) -> int:
        """Return the ticket of work that begins; larger than all before it."""
        self._newest += 1
        self._open[self._newest] = None
        return self._newest

    def close(self, ticket: int) -> None:
        """That work has ended. Raise KeyError where the ticket is not open."""
        del self._open[ticket]

    @property
    def passed(self) -> int:
        """The newest ticket with none open up to it."""
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
        """Take one item out before its fence is passed, for work that comes behind; return the fence, 0 when it is not
        here."""
        return self._fence_of.pop(item, 0)

    def opened(self) -> list[int]:
        """Take out all whose fence is passed."""
        if not self._waiting:
            return []
        passed = self._fences.passed
        opened = []
        for fence in [fence for fence in self._waiting if fence <= passed]:
            for item in self._waiting.pop(fence):
                # One that was taken, and perhaps put back, stands here all the same.
                if self._fence_of.get(item) == fence:
                    del self._fence_of[item]
                    opened.append(item)
        return opened
