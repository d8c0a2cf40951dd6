"""Delays the reuse of items that work in flight still touches: steps by a watermark, transfers by what they name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Fences:
    """Tickets of the steps in flight, with the copies that they begin with. They close in any order.

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
    """Released items that may still be touched: until the fence is passed and the transfers that name them are over.

    A transfer may take as long as thousands of steps, so it has no ticket of the fences: it holds back what it names,
    and nothing else.
    """

    def __init__(self, fences: Fences) -> None:
        self._fences = fences
        self._fence_of: dict[int, int] = {}
        #: Fence -> items released behind it; one that was taken, and possibly put back, is still in its old list.
        self._waiting: dict[int, list[int]] = {}
        #: Ticket of a transfer -> the items that it touches.
        self._transfers: dict[int, tuple[int, ...]] = {}
        self._num_transfers = 0
        #: Item -> the number of open transfers that name it.
        self._named: Counter[int] = Counter()
        #: Items whose fence is passed and that transfers name.
        self._held: set[int] = set()

    def __len__(self) -> int:
        return len(self._fence_of)

    def __contains__(self, item: int) -> bool:
        return item in self._fence_of

    @property
    def num_behind_steps(self) -> int:
        """Number of items that come out once the steps in flight have ended."""
        return len(self) - sum(item in self._fence_of for item in self._named)

    def is_named(self, item: int) -> bool:
        """Return whether a transfer names the item."""
        return item in self._named

    def is_touched(self, item: int, fence: int) -> bool:
        """Return whether an item that is released behind this fence has to wait here."""
        return fence > self._fences.passed or item in self._named

    def put(self, item: int, fence: int) -> None:
        """Put an item here that is touched, by work behind this fence or by a transfer."""
        self._fence_of[item] = fence
        if fence > self._fences.passed:
            self._waiting.setdefault(fence, []).append(item)
        else:
            self._held.add(item)

    def take(self, item: int) -> int | None:
        """Take an item out before its time, for later work; return its fence, None if it is not here."""
        self._held.discard(item)
        return self._fence_of.pop(item, None)

    def opened(self) -> list[int]:
        """Remove and return the items that nothing touches any more."""
        if not self._waiting:
            return []
        passed = self._fences.passed
        opened = []
        for fence in [fence for fence in self._waiting if fence <= passed]:
            for item in self._waiting.pop(fence):
                if self._fence_of.get(item) != fence:
                    continue
                if item in self._named:
                    self._held.add(item)
                else:
                    del self._fence_of[item]
                    opened.append(item)
        return opened

    def open_transfer(self, items: Iterable[int]) -> int:
        """Return the ticket of a transfer that touches these items, here or not, until it is closed."""
        self._num_transfers += 1
        self._transfers[self._num_transfers] = named = tuple(set(items))
        self._named.update(named)
        return self._num_transfers

    def close_transfer(self, ticket: int) -> list[int]:
        """Remove and return the items that waited for this transfer alone. Raise KeyError if it is not open."""
        named = self._transfers.pop(ticket)
        self._named.subtract(named)
        self._named = +self._named
        opened = [item for item in named if item in self._held and item not in self._named]
        for item in opened:
            self._held.discard(item)
            del self._fence_of[item]
        return opened
