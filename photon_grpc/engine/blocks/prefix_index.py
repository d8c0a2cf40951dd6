"""The blocks that hold known prefixes of sequences.

A prefix is a path of nodes in a tree whose root stands for (adapter, owner, salt). Each node is a whole block of ids
after those of its parent. The ids themselves are the key, so no hash can collide. A node knows which block of each
KVGroup holds its keys and values. In a group without a window it always has one: without that block nothing after it
can be used, so the node is forgotten with its subtree. In a group with a window it may lack one, since a hit needs only
the blocks that the window reaches back to.

A table is released from its end, so the least recently used block of a group without a window is a leaf.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from photon_grpc.core.kv import KVPlan, PrefixNode
from photon_grpc.engine.blocks.eviction import EvictionOrder


class PrefixIndex(Protocol):
    """Knows the content of blocks for the BlockPool. `RadixIndex` remembers it, `NoPrefixIndex` does not."""

    def match(self, root: Hashable, ids: Sequence[int], max_tokens: int) -> list[PrefixNode]:
        """Return the path of the longest known prefix of `ids`, at most `max_tokens`, that a sequence can continue.

        It is complete in groups without a window, and as far back as the window reaches in the others.
        """

    def publish(
        self, root: Hashable, parent: PrefixNode | None, ids: Sequence[int], blocks: Sequence[int]
    ) -> PrefixNode | None:
        """Make `blocks`, one of each group or 0, known as `ids` after `parent`, or at the start if that is None.

        Where another block is known as that already, it stays. Return None if that is so in all groups: then nothing
        may be published after these blocks.
        """

    def knows(self, block: int) -> bool: ...

    def mark_unused(self, block: int) -> None:
        """Note that `block` has lost its last reference, so that it may be evicted."""

    def keep(self, blocks: Iterable[int]) -> None:
        """Note that a session has used `blocks`, so that they are evicted later."""

    def mark_used(self, block: int) -> None:
        """Note that `block` is referenced again."""

    def evict(self) -> set[int]:
        """Forget the least recently used block without references.

        Return it and all blocks that cannot be reached without it. Raise KeyError if every block has references.
        """

    def forget(self, blocks: Iterable[int]) -> set[int]:
        """Forget the nodes of these blocks and their subtrees; return all forgotten blocks."""

    def forget_beginning(self, root: Hashable, ids: Sequence[int]) -> set[int]:
        """Forget the first node of `ids` and its subtree; return all forgotten blocks."""

    @property
    def num_unused(self) -> int: ...

    def __len__(self) -> int:
        """Return the number of known blocks."""


class NoPrefixIndex:
    """A prefix index that remembers nothing."""

    num_unused = 0

    def match(self, root: Hashable, ids: Sequence[int], max_tokens: int) -> list[PrefixNode]:
        return []

    def publish(
        self, root: Hashable, parent: PrefixNode | None, ids: Sequence[int], blocks: Sequence[int]
    ) -> PrefixNode | None:
        return None

    def knows(self, block: int) -> bool:
        return False

    def mark_unused(self, block: int) -> None:
        raise KeyError(block)

    def keep(self, blocks: Iterable[int]) -> None:
        pass

    def mark_used(self, block: int) -> None:
        pass

    def evict(self) -> set[int]:
        raise KeyError("no block is known")

    def forget(self, blocks: Iterable[int]) -> set[int]:
        return set()

    def forget_beginning(self, root: Hashable, ids: Sequence[int]) -> set[int]:
        return set()

    def __len__(self) -> int:
        return 0


class RadixIndex:
    """A radix tree of whole blocks. Unreferenced blocks of all groups are evicted in one order."""

    def __init__(self, plan: KVPlan) -> None:
        self._plan = plan
        self._no_blocks = (0,) * len(plan.groups)
        #: (group, window) of the groups with a window.
        self._windows = [(number, group.window) for number, group in enumerate(plan.groups) if group.window]
        #: Root key -> its root node, which is removed with its last child.
        self._roots: dict[Hashable, PrefixNode] = {}
        #: Block -> its node and group.
        self._places: dict[int, tuple[PrefixNode, int]] = {}
        self._unused = EvictionOrder()

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def __len__(self) -> int:
        return len(self._places)

    def match(self, root: Hashable, ids: Sequence[int], max_tokens: int) -> list[PrefixNode]:
        found: list[PrefixNode] = []
        node, size = self._roots.get(root), self._plan.block_size
        for start in range(0, max_tokens - size + 1, size):
            node = node and node.children.get(_packed(ids[start : start + size]))
            if node is None:
                break
            found.append(node)
        return found[: self._num_usable(found)] if self._windows else found

    def _num_usable(self, path: list[PrefixNode]) -> int:
        """Return the longest part of the path after which every window finds the blocks that it reaches back to."""
        usable = 0
        #: For each group with a window, the number of nodes up to this one that have a block, without a gap.
        held = [0] * len(self._windows)
        for num_nodes, node in enumerate(path, 1):
            held = [run + 1 if node.blocks[group] else 0 for run, (group, _) in zip(held, self._windows, strict=True)]
            behind = [self._plan.behind(window, num_nodes * self._plan.block_size) for _, window in self._windows]
            if all(run + skipped >= num_nodes for run, skipped in zip(held, behind, strict=True)):
                usable = num_nodes
        return usable

    def publish(
        self, root: Hashable, parent: PrefixNode | None, ids: Sequence[int], blocks: Sequence[int]
    ) -> PrefixNode | None:
        if parent is None:
            parent = self._roots.get(root) or PrefixNode(None, root, 0, self._no_blocks)
        packed = _packed(ids)
        node = parent.children.get(packed) or PrefixNode(parent, packed, parent.depth + 1, self._no_blocks)
        lacking = [group for group, block in enumerate(blocks) if block and not node.blocks[group]]
        if not lacking:
            return None
        for group in lacking:
            node.blocks[group] = blocks[group]
            self._places[blocks[group]] = node, group
        parent.children[packed] = node
        if parent.parent is None:
            self._roots[root] = parent
        return node

    def knows(self, block: int) -> bool:
        return block in self._places

    def mark_unused(self, block: int) -> None:
        self._unused.add(block)

    def keep(self, blocks: Iterable[int]) -> None:
        self._unused.keep(filter(self.knows, blocks))

    def mark_used(self, block: int) -> None:
        self._unused.remove(block)

    def evict(self) -> set[int]:
        block = self._unused.first(len(self))
        node, group = self._places[block]
        if not self._plan.groups[group].window:
            return self._forget_node(node)
        self._unused.forget(block)
        del self._places[block]
        node.blocks[group] = 0
        self._prune(node)
        return {block}

    def forget(self, blocks: Iterable[int]) -> set[int]:
        gone: set[int] = set()
        for block in blocks:
            if block in self._places:
                gone |= self._forget_node(self._places[block][0])
        return gone

    def forget_beginning(self, root: Hashable, ids: Sequence[int]) -> set[int]:
        top = self._roots.get(root)
        node = top and top.children.get(_packed(ids[: self._plan.block_size]))
        return self._forget_node(node) if node else set()

    def _forget_node(self, node: PrefixNode) -> set[int]:
        """Forget a node and its subtree; return all forgotten blocks."""
        gone: set[int] = set()
        doomed = [node]
        while doomed:
            each = doomed.pop()
            each.is_known = False
            doomed += each.children.values()
            for block in filter(None, each.blocks):
                gone.add(block)
                del self._places[block]
                self._unused.forget(block)
        node.children, node.blocks = {}, []
        self._prune(node)
        return gone

    def _prune(self, node: PrefixNode) -> None:
        """Remove the node, and its ancestors, from the tree if they have neither blocks nor children."""
        while not node.children and not any(node.blocks):
            node.is_known = False
            if node.parent is None:
                del self._roots[node.key]
                return
            del node.parent.children[node.key]
            node = node.parent


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
