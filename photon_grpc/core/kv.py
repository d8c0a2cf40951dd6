"""Which memory a sequence's keys and values live in, as numbers: blocks of tokens, never bytes."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec


class KVSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one layer keeps per token."""

    num_kv_heads: int
    head_dim: int
    #: Tokens a layer looks back; 0 is all of them.
    window: int = 0


class KVGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers with equal page bytes and the same window: they share block ids."""

    spec: KVSpec
    layers: tuple[int, ...]


class BlockTable:
    """Which blocks hold one sequence: `groups[g][i]` holds its tokens [i * block_size, (i + 1) * block_size) in KVGroup g.

    Changed by the BlockPool only.
    """

    __slots__ = ("groups", "capacity", "publish_at", "root", "tail")

    def __init__(self, num_groups: int = 1) -> None:
        self.groups: list[list[int]] = [[] for _ in range(num_groups)]
        #: Tokens that fit into the blocks held.
        self.capacity = 0
        #: Tokens at which the next block is whole and becomes known to the prefix index.
        self.publish_at = 1 << 62
        #: Who may share: (adapter, owner, salt).
        self.root: Hashable = None
        #: What the next published block hangs from: the last published one, `root` before any.
        self.tail: Hashable = None

    @property
    def num_blocks(self) -> int:
        return sum(len(group) for group in self.groups)
