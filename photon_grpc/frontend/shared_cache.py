"""A cache that callers share, bounded in bytes.

Each caller keeps what it used last. Over the bound, only the caller with most bytes loses something.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: Memory of one caller's reference to one value, with a part of the caller's own memory.
HOLD_BYTES = 768
#: Bounded because an eviction looks at all callers.
MAX_CALLERS = 1024


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    num_bytes: int
    num_callers: int = 0


class SharedCache(Generic[K, V]):
    """Holds for every caller the values that it used last, including those that another caller added.

    Over its bound, the caller with most bytes loses its least recently used value. A value that no caller has is
    dropped. If there are too many callers, the least recently active one loses all.

    Args:
        max_bytes: the most memory for values, each counted once, and for the references to them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: dict[K, _Entry[V]] = {}
        #: The keys of every caller. Keys and callers are ordered from the least recently used.
        self._used: OrderedDict[str, OrderedDict[K, None]] = OrderedDict()
        self._num_bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, caller: str, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._use(caller, key, entry)
        return entry.value

    def keep(self, caller: str, key: K, value: V, num_bytes: int) -> None:
        """Add a value of `num_bytes` unless the key has one already. One that is above the bound is not kept."""
        entry = self._entries.get(key)
        if entry is None:
            if num_bytes + HOLD_BYTES > self._max_bytes:
                return
            entry = self._entries[key] = _Entry(value, num_bytes)
            self._num_bytes += num_bytes
        self._use(caller, key, entry)

    def _use(self, caller: str, key: K, entry: _Entry[V]) -> None:
        used = self._used.setdefault(caller, OrderedDict())
        self._used.move_to_end(caller)
        if key in used:
            used.move_to_end(key)
            return
        used[key] = None
        entry.num_callers += 1
        self._num_bytes_of[caller] = self._num_bytes_of.get(caller, 0) + entry.num_bytes + HOLD_BYTES
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
        entry = self._entries[key]
        self._num_bytes_of[caller] -= entry.num_bytes + HOLD_BYTES
        self._num_bytes -= HOLD_BYTES
        entry.num_callers -= 1
        if not entry.num_callers:
            del self._entries[key]
            self._num_bytes -= entry.num_bytes
        if not used:
            del self._used[caller], self._num_bytes_of[caller]
