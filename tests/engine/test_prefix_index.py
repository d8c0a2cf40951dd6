"""The tree of known blocks, against one that is searched from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core.kv import PrefixNode
from photon_grpc.engine.blocks.prefix_index import RadixIndex
from tests.kv_plans import kv_plan

ROOT = (0, "", "")
NUM_BLOCKS = 12
#: Where a block is hung: below the root (0) or a block, as the ids (n, n).
hung = st.tuples(st.just("publish"), st.integers(0, NUM_BLOCKS), st.integers(0, 1))
forgotten = st.tuples(st.just("forget"), st.sets(st.integers(1, NUM_BLOCKS), max_size=3))


class FlatIndex:
    """block -> (parent, ids)."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[int, int]] = {}

    def publish(self, parent: int, number: int, block: int) -> bool:
        if (parent, number) in self.places.values():
            return False
        self.places[block] = parent, number
        return True

    def forget(self, blocks: set[int]) -> set[int]:
        gone = blocks & self.places.keys()
        while more := {block for block, (parent, _) in self.places.items() if parent in gone} - gone:
            gone |= more
        for block in gone:
            del self.places[block]
        return gone

    def match(self, numbers: list[int]) -> list[int]:
        found: list[int] = []
        for number in numbers:
            place = (found[-1] if found else 0, number)
            below = [block for block, at in self.places.items() if at == place]
            if not below:
                break
            found += below
        return found


@given(st.lists(hung | hung | hung | forgotten, max_size=40), st.lists(st.integers(0, 1), max_size=8))
def test_known_and_forgotten_prefixes_equal_those_of_a_flat_index(changes: list[Any], numbers: list[int]) -> None:
    index, flat = RadixIndex(kv_plan(2)), FlatIndex()
    nodes: dict[int, PrefixNode] = {}
    for change in changes:
        if change[0] == "forget":
            assert index.forget(change[1]) == flat.forget(change[1])
            continue
        _, parent, number = change
        free = [block for block in range(1, NUM_BLOCKS + 1) if not index.knows(block)]
        if free and (not parent or index.knows(parent)):
            node = index.publish(ROOT, nodes[parent] if parent else None, (number, number), [free[0]])
            assert (node is not None) == flat.publish(parent, number, free[0])
            if node is not None:
                nodes[free[0]] = node
    assert len(index) == len(flat.places)
    asked = [number for number in numbers for _ in range(2)]
    assert [node.blocks[0] for node in index.match(ROOT, asked, len(asked))] == flat.match(numbers)


class Counted(dict[Any, Any]):
    """Counts the entries that are looked at."""

    looked_at = 0

    def _look(self, count: int = 1) -> None:
        Counted.looked_at += count

    def __getitem__(self, key: Any) -> Any:
        self._look()
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._look()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._look(len(self))
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._look()
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._look()
        return super().pop(key, *default)

    def keys(self) -> Any:
        self._look(len(self))
        return super().keys()

    def values(self) -> Any:
        self._look(len(self))
        return super().values()

    def items(self) -> Any:
        self._look(len(self))
        return super().items()


def test_the_cost_of_forgetting_depends_on_what_is_forgotten_only() -> None:
    index = RadixIndex(kv_plan(1))
    chain, others = range(1, 61), range(61, 5000)
    node = None
    for block in chain:
        node = index.publish(ROOT, node, (block,), [block])
    for block in others:
        index.publish(ROOT, None, (block,), [block])
    for name, value in vars(index).items():
        if isinstance(value, dict):
            setattr(index, name, Counted(value))
    for known in [index._roots[ROOT], *(node for node, _ in index._places.values())]:
        known.children = Counted(known.children)
    Counted.looked_at = 0
    assert index.forget({1}) == set(chain)
    assert Counted.looked_at <= 12 * len(chain)
    assert len(index) == len(others)


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=2),
    st.integers(1, 4),
    st.lists(st.sets(st.integers(0, 2)), max_size=12),
    st.integers(0, 50),
)
def test_a_hit_is_the_longest_beginning_that_every_window_can_go_on_behind(
    windows: list[int], block_size: int, lacking: list[set[int]], max_tokens: int
) -> None:
    plan = kv_plan(block_size, 0, *windows)
    index, num_groups = RadixIndex(plan), len(plan.groups)
    ids = list(range(block_size * len(lacking)))
    node = None
    #: Of each group, the positions whose keys and values are held.
    held: list[set[int]] = [set() for _ in plan.groups]
    for column, groups in enumerate(lacking):
        span = range(column * block_size, (column + 1) * block_size)
        blocks = [1 + column * num_groups + group for group in range(num_groups)]
        for group in range(num_groups):
            if group in groups and plan.groups[group].window:
                blocks[group] = 0
            else:
                held[group] |= set(span)
        node = index.publish(ROOT, node, ids[span.start : span.stop], blocks)
    usable = [
        length
        for length in range(0, min(len(ids), max_tokens) + 1, block_size)
        if all(
            set(range(max(0, length - group.window + 1) if group.window else 0, length)) <= positions
            for group, positions in zip(plan.groups, held, strict=True)
        )
    ]
    assert len(index.match(ROOT, ids, max_tokens)) * block_size == max(usable)


def test_a_block_of_a_window_leaves_a_gap_and_one_of_all_tokens_takes_what_hangs_from_it() -> None:
    index = RadixIndex(kv_plan(1, 0, 2))
    first = index.publish(ROOT, None, (1,), [1, 2])
    second = index.publish(ROOT, first, (2,), [3, 4])
    index.publish(ROOT, second, (3,), [5, 6])
    for block in (2, 3):
        index.mark_unused(block)
    assert index.evict() == {2}
    assert [node.depth for node in index.match(ROOT, (1, 2, 3), 3)] == [1, 2, 3]
    assert index.match(ROOT, (1, 2, 3), 1) == []
    assert index.publish(ROOT, None, (1,), [7, 8]) is first and first is not None and first.blocks == [1, 8]
    assert index.evict() == {3, 4, 5, 6}
    assert len(index) == 2 and second is not None and not second.is_known


def test_a_beginning_whose_blocks_are_all_behind_the_window_is_kept_for_what_hangs_from_it() -> None:
    index = RadixIndex(kv_plan(1, 2))
    first = index.publish(ROOT, None, (1,), [1])
    index.publish(ROOT, first, (2,), [2])
    for block in (1, 2):
        index.mark_unused(block)
    assert index.evict() == {1}
    assert [node.blocks for node in index.match(ROOT, (1, 2), 2)] == [[0], [2]]
    assert index.evict() == {2}
    assert not len(index) and not index._roots
