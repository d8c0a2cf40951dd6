"""The memory layout of keys and values, and all arithmetic of blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from photon_grpc.errors import ModelLoadError

#: More tokens than any sequence has.
NEVER = 1 << 62

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class PageFormat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The memory of one layer per token: planes × heads × width numbers."""

    heads: int
    width: int
    #: Name of the dtype in torch.
    dtype: str
    #: 2: keys and values.
    planes: int = 2

    @property
    def token_bytes(self) -> int:
        return self.planes * self.heads * self.width * _BYTES[self.dtype]


class LayerKV(msgspec.Struct, frozen=True, array_like=True):
    """The data that one layer keeps, and the keys that it attends to."""

    format: PageFormat
    #: Number of keys that a token attends to, including its own; 0 is all of them.
    window: int = 0


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Layers of a KVGroup that keep the same per token. Their pages of one block lie side by side."""

    format: PageFormat
    #: The index of a layer here is its row in the section's pages.
    layers: tuple[int, ...]


class KVGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers with the same window, which share a block table. A block is one page in each of the sections.

    So whatever becomes of a block (a prefix hit, a fork, a copy, eviction) happens to all its sections.
    """

    #: Sections with the same number have the same format in all groups of a plan; one may have no layer.
    sections: tuple[Section, ...]
    window: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for section in self.sections for layer in section.layers)


class KVPlan(msgspec.Struct, frozen=True, array_like=True):
    """The layout of a model's keys and values in blocks. All groups take their blocks from one space of ids.

    Groups without a window come first.
    """

    groups: tuple[KVGroup, ...]
    #: Tokens in a block, for all layers of one group.
    block_size: int
    #: Most tokens of one sequence that a step computes.
    max_chunk: int = NEVER

    @property
    def sections(self) -> tuple[tuple[PageFormat, int], ...]:
        """The format of every section, and the layers that a block has room for in it.

        A group with fewer leaves the rest unused.
        """
        numbered = zip_longest(*(group.sections for group in self.groups))
        return tuple(_room([section for section in same if section is not None]) for same in numbered)

    @property
    def block_bytes(self) -> int:
        return sum(kept.token_bytes * num_layers for kept, num_layers in self.sections) * self.block_size

    def columns(self, num_tokens: int) -> int:
        """Return the entries of a group's block table that hold this many tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def whole(self, num_tokens: int) -> int:
        """Return the columns that this many tokens fill completely."""
        return num_tokens // self.block_size

    def behind(self, window: int, num_tokens: int) -> int:
        """Return the columns that tokens from position `num_tokens` on no longer attend to, for this window."""
        return max(0, num_tokens - window + 1) // self.block_size if window else 0

    def slides_at(self, window: int, column: int) -> int:
        """Return the least number of tokens for which `behind` counts this column."""
        return (column + 1) * self.block_size + window - 1 if window else NEVER

    def at_admission(self, window: int, num_computed: int, num_tokens: int) -> int:
        """Return the columns that a sequence gets at admission, with `num_computed` of `num_tokens` tokens computed.

        These are all columns, or with a window those of its first chunk, since the window frees others later.
        """
        return self.columns(min(num_tokens, num_computed + self.max_chunk) if window else num_tokens)

    def blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds in all groups while this many tokens are computed in chunks.

        The first token of a chunk attends to window - 1 tokens before it; blocks wholly before those are freed.
        """
        columns = self.columns(num_tokens)
        return sum(min(columns, self._most_columns(group.window)) for group in self.groups)

    def tokens(self, num_blocks: int) -> int:
        """Return the length of the longest sequence that never holds more than `num_blocks` blocks.

        Return NEVER if windows free blocks as fast as the sequence takes them.
        """
        most = sorted(self._most_columns(group.window) for group in self.groups)
        # Groups share equally, except that blocks that short windows cannot use go to the others.
        for num_served, columns in enumerate(most):
            share = num_blocks // (len(most) - num_served)
            if share < columns:
                return share * self.block_size
            num_blocks -= columns
        return NEVER

    def _most_columns(self, window: int) -> int:
        """Return the columns for a chunk and what its first token attends to, at any alignment."""
        return self.columns(window + self.max_chunk - 2) + 1 if window else NEVER


def _room(sections: Sequence[Section]) -> tuple[PageFormat, int]:
    return sections[0].format, max(len(section.layers) for section in sections)


def kv_groups(layers: Sequence[LayerKV]) -> tuple[KVGroup, ...]:
    """Group layers by window into groups of equal size, the last of a window possibly smaller, full attention first.

    The size minimizes the layer places plus the groups: an unused place costs memory in every block, a group costs a
    block table in every sequence. 4 full and 22 sliding layers become one full group and six sliding groups of 4, the
    last with two unused places.

    Layers that keep something else per token have a section of their own in the groups of their window, each with its
    share of the size.
    """
    members: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        members.setdefault(layer.window, []).append(number)
    counts = [len(numbers) for numbers in members.values()]

    def cost(size: int) -> tuple[int, int]:
        num_groups = sum(-(-count // size) for count in counts)
        return num_groups * (size + 1), num_groups * size

    size = min(range(1, max(counts) + 1), key=cost)
    formats = tuple(dict.fromkeys(layer.format for layer in layers))
    groups: list[KVGroup] = []
    for window, numbers in sorted(members.items()):
        kept = [(form, [number for number in numbers if layers[number].format == form]) for form in formats]
        groups += _cut(kept, window, size)
    return tuple(groups)


def _cut(kept: Sequence[tuple[PageFormat, Sequence[int]]], window: int, size: int) -> Iterator[KVGroup]:
    """Cut the layers of one window, by their formats, into groups of about `size` layers."""
    count = sum(len(numbers) for _, numbers in kept)
    # The layers of each format in one group; a format without layers has empty sections.
    shares = [max(1, -(-len(numbers) * size // count)) for _, numbers in kept]
    num_groups = max(-(-len(numbers) // share) for (_, numbers), share in zip(kept, shares, strict=True))
    for number in range(num_groups):
        yield KVGroup(
            tuple(
                Section(form, tuple(numbers[number * share : (number + 1) * share]))
                for (form, numbers), share in zip(kept, shares, strict=True)
            ),
            window,
        )


def attached(groups: Sequence[KVGroup], draft_groups: Iterable[KVGroup]) -> tuple[KVGroup, ...]:
    """Return the groups of a model, with those of a draft model (or drafting head) on the blocks of the first.

    Every section of a draft group becomes a further section of the first group, in order, with its rows unchanged: its
    pages are those of section `len(groups[0].sections) + number`, its block table is that of group 0. The layers of the
    draft model are numbered on after the model's own. Its windows mask keys but free no block.

    Raise ModelLoadError if there are draft groups and the first group has a window, which would free blocks that the
    draft model still needs.
    """
    first, *others = groups
    draft_groups = tuple(draft_groups)
    if first.window and draft_groups:
        raise ModelLoadError("a model with a sliding window in every layer cannot hold the keys of a draft model")
    offset = sum(len(group.layers) for group in groups)
    sections = [
        Section(section.format, tuple(offset + layer for layer in section.layers))
        for group in draft_groups
        for section in group.sections
    ]
    return KVGroup((*first.sections, *sections), first.window), *others


class PagePlace(NamedTuple):
    """The place of a layer's pages: its KVGroup, the section there, and its row in the section."""

    group: int
    section: int
    row: int


def place(groups: Iterable[KVGroup], layer: int) -> PagePlace:
    """Return the place of a layer."""
    return next(
        PagePlace(number, at, section.layers.index(layer))
        for number, group in enumerate(groups)
        for at, section in enumerate(group.sections)
        if layer in section.layers
    )


class PrefixNode:
    """One whole block of ids after those of its parent, in the tree of known prefixes.

    `blocks[g]` holds it in KVGroup g, or is 0 if no block does. Only the prefix index changes it.
    """

    __slots__ = ("parent", "key", "depth", "blocks", "children", "is_known")

    def __init__(self, parent: PrefixNode | None, key: Hashable, depth: int, blocks: Iterable[int]) -> None:
        #: None for a root.
        self.parent = parent
        #: Its key among the children of its parent.
        self.key = key
        #: Number of blocks of ids up to here; 0 for a root.
        self.depth = depth
        self.blocks = list(blocks)
        self.children: dict[Hashable, PrefixNode] = {}
        self.is_known = True


class BlockTable:
    """The blocks of one sequence: `groups[g][i]` holds its tokens [i * block_size, (i + 1) * block_size) in KVGroup g.

    It is 0 once the group's window has passed these tokens. Groups with a window may have fewer blocks than the others;
    they get more before a step computes tokens there. Only the BlockPool changes it.
    """

    __slots__ = ("groups", "capacity", "publish_at", "slide_at", "settle_at", "root", "tail")

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        #: Tokens that fit into the held blocks of every group.
        self.capacity = 0
        #: Number of tokens at which the next block is full and becomes known to the prefix index.
        self.publish_at = NEVER
        #: Number of settled tokens at which the next block is passed by a window.
        self.slide_at = NEVER
        #: The smaller of the two.
        self.settle_at = NEVER
        #: Prefixes are shared within one (adapter, owner, salt).
        self.root: Hashable = None
        #: The parent of the next published block; None for the first.
        self.tail: PrefixNode | None = None
