"""A cache that callers share, bounded in bytes: each has what it used last, and what one brings costs another nothing
while that has less."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: What it takes to know that a caller has one of the things; some of it is the caller's own.
HOLD_BYTES = 768
#: An eviction looks at all of them.
MAX_CALLERS = 1024


@dataclass(slots=True)
class _Thing(Generic[V]):
    value: V
    num_bytes: int
    num_callers: int = 0


class SharedCache(Generic[K, V]):
    """Holds for every caller the things that it used last, also those that another brought. Over its bound, the caller
    with most bytes loses what it has not used for longest; a thing is gone when no caller has it. Of too many callers,
    the one that has used nothing for longest loses all.

    Args:
        max_bytes: of things, each counted once, and of what is known of their callers.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._things: dict[K, _Thing[V]] = {}
        #: Of every caller its things, the oldest use first; callers, too.
        self._used: OrderedDict[str, OrderedDict[K, None]] = OrderedDict()
        self._num_bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._things)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, caller: str, key: K) -> V | None:
        thing = self._things.get(key)
        if thing is None:
            return None
        self._use(caller, key, thing)
        return thing.value

    def keep(self, caller: str, key: K, value: V, num_bytes: int) -> None:
        """`value` takes `num_bytes`; one that is there already stays."""
        thing = self._things.get(key)
        if thing is None:
            thing = self._things[key] = _Thing(value, num_bytes)
            self._num_bytes += num_bytes
        self._use(caller, key, thing)

    def _use(self, caller: str, key: K, thing: _Thing[V]) -> None:
        used = self._used.setdefault(caller, OrderedDict())
        self._used.move_to_end(caller)
        if key in used:
            used.move_to_end(key)
            return
        used[key] = None
        thing.num_callers += 1
        self._num_bytes_of[caller] = self._num_bytes_of.get(caller, 0) + thing.num_bytes + HOLD_BYTES
        self._num_bytes += HOLD_BYTES
        while len(self._used) > MAX_CALLERS:
            self._drop_oldest(next(iter(self._used)))
        while self._num_bytes > self._max_bytes:
            most = max(self._num_bytes_of, key=self._num_bytes_of.__getitem__)
            is_own = self._num_bytes_of.get(caller) == self._num_bytes_of[most]
            self._drop_oldest(caller if is_own else most)

    def _drop_oldest(self, caller: str) -> None:
        used = self._used[caller]
        key, _ = used.popitem(last=False)
        thing = self._things[key]
        self._num_bytes_of[caller] -= thing.num_bytes + HOLD_BYTES
        self._num_bytes -= HOLD_BYTES
        thing.num_callers -= 1
        if not thing.num_callers:
            del self._things[key]
            self._num_bytes -= thing.num_bytes
        if not used:
            del self._used[caller], self._num_bytes_of[caller]
