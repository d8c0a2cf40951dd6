"""The memory of keys and values, as numbers. The only arithmetic of blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import msgspec

from photon_grpc.errors import ModelLoadError

#: More tokens than any sequence has.
NEVER = 1 << 62

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class PageFormat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A layer's memory per token: planes × heads × width numbers."""

    heads: int
    width: int
    #: As torch names it.
    dtype: str
    #: Keys and values.
    planes: int = 2

    @property
    def token_bytes(self) -> int:
        return self.planes * self.heads * self.width * _BYTES[self.dtype]


class LayerKV(msgspec.Struct, frozen=True, array_like=True):
    """A layer's keys and values."""

    format: PageFormat
    #: Keys that a token attends, its own included; 0 is all before it.
    window: int = 0


class KVGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers with the same window whose pages of one block lie side by side: they share a block table."""

    format: PageFormat
    #: A layer's place here is its plane in the group's pages.
    layers: tuple[int, ...]
    window: int = 0


class KVPlan(msgspec.Struct, frozen=True, array_like=True):
    """The layout of a model's keys and values in blocks. Every group takes its blocks from one space of ids.

    Groups that attend everything come first.
    """

    groups: tuple[KVGroup, ...]
    #: Tokens a block holds, of the layers of one group.
    block_size: int
    #: Tokens of one sequence that a step computes at most.
    max_chunk: int = NEVER

    @property
    def format(self) -> PageFormat:
        """That of all groups."""
        return self.groups[0].format

    @property
    def layers_per_block(self) -> int:
        """Layers a block has room for; a group of fewer leaves the rest unused."""
        return max(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return self.layers_per_block * self.format.token_bytes * self.block_size

    def columns(self, num_tokens: int) -> int:
        """Entries of a group's block table that hold this many tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def whole(self, num_tokens: int) -> int:
        """Columns that this many tokens fill."""
        return num_tokens // self.block_size

    def behind(self, window: int, num_tokens: int) -> int:
        """Columns that no token from position `num_tokens` on attends, in a group of this window."""
        return max(0, num_tokens - window + 1) // self.block_size if window else 0

    def slides_at(self, window: int, column: int) -> int:
        """Return the number of tokens from which on `behind` counts this column."""
        return (column + 1) * self.block_size + window - 1 if window else NEVER

    def at_admission(self, window: int, num_computed: int, num_tokens: int) -> int:
        """Columns that a sequence of which `num_computed` of `num_tokens` tokens are there gets in a group of this
        window: all, or where a window will free others those of its first chunk."""
        return self.columns(min(num_tokens, num_computed + self.max_chunk) if window else num_tokens)

    def blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most while so many tokens are computed one chunk behind the other, over all
        groups.

        The first token of a chunk attends a window less one before it; what is wholly behind that is given back.
        """
        columns = self.columns(num_tokens)
        return sum(min(columns, self._most_columns(group.window)) for group in self.groups)

    def tokens(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that never holds more than so many blocks. More than any sequence has where
        windows free as many as it takes."""
        most = sorted(self._most_columns(group.window) for group in self.groups)
        # Groups share alike, but what the shortest windows have no use for is for the others.
        for num_served, columns in enumerate(most):
            share = num_blocks // (len(most) - num_served)
            if share < columns:
                return share * self.block_size
            num_blocks -= columns
        return NEVER

    def _most_columns(self, window: int) -> int:
        """Columns that hold the tokens of a chunk and those that its first one attends, wherever they begin."""
        return self.columns(window + self.max_chunk - 2) + 1 if window else NEVER


def kv_groups(layers: Sequence[LayerKV]) -> tuple[KVGroup, ...]:
    """Group of layers with the same window, of equal size but for places left unused, those without a window first.

    Where windows have unequal numbers of layers, the size is that of the fewest places and groups together: an unused
    place is memory in every block, a group is a block table in every sequence. 4 full and 22 sliding layers become one
    full group and six sliding ones of 4, the last with two places unused.

    Raise ModelLoadError where layers differ in what they keep per token.
    """
    if len({layer.format for layer in layers}) != 1:
        raise ModelLoadError("layers that keep different keys and values per token are not supported")
    members: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        members.setdefault(layer.window, []).append(number)
    counts = [len(numbers) for numbers in members.values()]

    def cost(size: int) -> tuple[int, int]:
        num_groups = sum(-(-count // size) for count in counts)
        return num_groups * (size + 1), num_groups * size

    size = min(range(1, max(counts) + 1), key=cost)
    return tuple(
        KVGroup(layers[0].format, tuple(numbers[first : first + size]), window)
        for window, numbers in sorted(members.items())
        for first in range(0, len(numbers), size)
    )


def place(groups: Iterable[KVGroup], layer: int) -> tuple[int, int]:
    """(group, plane) of a layer."""
    return next((number, group.layers.index(layer)) for number, group in enumerate(groups) if layer in group.layers)


class PrefixNode:
    """One whole block of ids behind those of its parent, in the tree of known beginnings; `blocks[g]` holds it in
    KVGroup g, 0: none does.

    Changed by the prefix index only.
    """

    __slots__ = ("parent", "key", "depth", "blocks", "children", "is_known")

    def __init__(self, parent: PrefixNode | None, key: Hashable, depth: int, blocks: Iterable[int]) -> None:
        #: None: this is a root.
        self.parent = parent
        #: Among the parent's children.
        self.key = key
        #: Blocks of ids up to here; 0 of a root.
        self.depth = depth
        self.blocks = list(blocks)
        self.children: dict[Hashable, PrefixNode] = {}
        self.is_known = True


class BlockTable:
    """The blocks of one sequence: `groups[g][i]` holds its tokens [i * block_size, (i + 1) * block_size) in KVGroup g;
    0 where the group's window has left them behind. Groups with a window may have fewer than the others, and get more
    before a step computes what belongs there.

    Changed by the BlockPool only.
    """

    __slots__ = ("groups", "capacity", "publish_at", "slide_at", "settle_at", "root", "tail")

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        #: Tokens that fit into the blocks held, in every group.
        self.capacity = 0
        #: Tokens at which the next block is whole and becomes known to the prefix index.
        self.publish_at = NEVER
        #: Settled tokens at which the next block is behind a window.
        self.slide_at = NEVER
        #: The smaller of the two: settled tokens at which there is something to do.
        self.settle_at = NEVER
        #: Prefixes are shared within one (adapter, owner, salt).
        self.root: Hashable = None
        #: The parent of the next published block; None: it is the first.
        self.tail: PrefixNode | None = None
