"""Which memory a sequence's keys and values live in, as numbers: blocks of tokens, never bytes."""

from __future__ import annotations

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

    __slots__ = ("groups", "capacity", "num_published", "tail", "namespace")

    def __init__(self, num_groups: int = 1) -> None:
        self.groups: list[list[int]] = [[] for _ in range(num_groups)]
        #: Tokens that fit into the blocks held.
        self.capacity = 0
        #: Leading blocks whose content the prefix index knows; -1 once the chain left the index for good.
        self.num_published = 0
        #: The last published block, the parent of the next one; the namespace before any.
        self.tail = 0
        #: Who may share: a negative number that stands for (adapter, salt).
        self.namespace = 0

    @property
    def num_blocks(self) -> int:
        return sum(len(group) for group in self.groups)
