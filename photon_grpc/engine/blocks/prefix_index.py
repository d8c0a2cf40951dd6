"""Which blocks hold which beginnings of sequences.

A block's identity is its place in a tree: (parent block, the ids it holds), the root being (adapter, owner, salt). The ids themselves are
the key, so a hit is verified by construction and no hash can collide. A block may leave the tree only as a leaf, or its children would
hang from an id that soon means something else; a table is released from its end, so the least recently used block is always a leaf.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol

Parent = Hashable


class PrefixIndex(Protocol):
    """What BlockPool asks about content. `RadixIndex` remembers, `NoPrefixIndex` does not."""

    def match(self, root: Parent, ids: Sequence[int], max_tokens: int) -> list[int]:
        """Blocks that hold the longest known beginning of `ids`, at most `max_tokens` of it, in order."""

    def publish(self, parent: Parent, ids: Sequence[int], block: int) -> bool:
        """Makes `block` known as `ids` after `parent`. False when another block already is that: then nothing may hang from this one."""

    def knows(self, block: Parent) -> bool: ...

    def rest(self, block: int) -> None:
        """Nobody references `block` any more: it may be evicted, the longest resting first."""

    def wake(self, block: int) -> None:
        """`block` is referenced again."""

    def evict(self) -> set[int]:
        """Forgets the block that rested longest, and answers it with all that hung from it. Raises KeyError when none rests."""

    def forget(self, blocks: set[int]) -> set[int]:
        """Forgets these and all that hang from them; answers all that were forgotten."""

    @property
    def num_resting(self) -> int: ...

    def __len__(self) -> int: ...


class NoPrefixIndex:
    """Remembers nothing."""

    num_resting = 0

    def match(self, root: Parent, ids: Sequence[int], max_tokens: int) -> list[int]:
        return []

    def publish(self, parent: Parent, ids: Sequence[int], block: int) -> bool:
        return False

    def knows(self, block: Parent) -> bool:
        return False

    def rest(self, block: int) -> None:
        raise KeyError(block)

    def wake(self, block: int) -> None:
        pass

    def evict(self) -> set[int]:
        raise KeyError("nothing rests here")

    def forget(self, blocks: set[int]) -> set[int]:
        return set()

    def __len__(self) -> int:
        return 0


class RadixIndex:
    """A tree of whole blocks with least-recently-used eviction of unreferenced leaves."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: What hangs from each parent: ids -> block. None stays here empty.
        self._children: dict[Parent, dict[bytes, int]] = {}
        #: Where each block hangs.
        self._places: dict[int, tuple[Parent, bytes]] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    def __len__(self) -> int:
        return len(self._places)

    def match(self, root: Parent, ids: Sequence[int], max_tokens: int) -> list[int]:
        found: list[int] = []
        parent = root
        size = self._block_size
        for start in range(0, max_tokens - size + 1, size):
            children = self._children.get(parent)
            block = children.get(_packed(ids[start : start + size])) if children else None
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def publish(self, parent: Parent, ids: Sequence[int], block: int) -> bool:
        packed = _packed(ids)
        children = self._children.setdefault(parent, {})
        if packed in children:
            return False
        children[packed] = block
        self._places[block] = parent, packed
        return True

    def knows(self, block: Parent) -> bool:
        return block in self._places

    def rest(self, block: int) -> None:
        self._resting[block] = None

    def wake(self, block: int) -> None:
        self._resting.pop(block, None)

    def evict(self) -> set[int]:
        block, _ = self._resting.popitem(last=False)
        if block in self._children:
            # Its children are behind a fence and will come to rest later than it did: they are forgotten with it.
            return self.forget({block})
        self._remove(block)
        return {block}

    def forget(self, blocks: set[int]) -> set[int]:
        gone: set[int] = set()
        doomed = [block for block in blocks if block in self._places]
        while doomed:
            block = doomed.pop()
            if block not in gone:
                gone.add(block)
                doomed += self._children.get(block, {}).values()
                self._remove(block)
                self._resting.pop(block, None)
        return gone

    def _remove(self, block: int) -> None:
        parent, packed = self._places.pop(block)
        siblings = self._children[parent]
        del siblings[packed]
        if not siblings:
            del self._children[parent]


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
