"""The tree of known blocks, against one that is searched from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.engine.blocks.prefix_index import RadixIndex

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
def test_what_is_known_and_what_is_forgotten_are_those_of_a_flat_index(changes: list[Any], numbers: list[int]) -> None:
    index, flat = RadixIndex(2), FlatIndex()
    for change in changes:
        if change[0] == "forget":
            assert index.forget(change[1]) == flat.forget(change[1])
            continue
        _, parent, number = change
        free = [block for block in range(1, NUM_BLOCKS + 1) if not index.knows(block)]
        if free and (not parent or index.knows(parent)):
            published = index.publish(parent or ROOT, (number, number), free[0])
            assert published == flat.publish(parent, number, free[0])
    assert len(index) == len(flat.places)
    asked = [number for number in numbers for _ in range(2)]
    assert index.match(ROOT, asked, len(asked)) == flat.match(numbers)


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


def test_forgetting_costs_what_is_forgotten_and_not_what_is_known() -> None:
    index = RadixIndex(1)
    chain, others = range(1, 61), range(61, 5000)
    for block in chain:
        index.publish(ROOT if block == 1 else block - 1, (block,), block)
    for block in others:
        index.publish(ROOT, (block,), block)
    for name, value in vars(index).items():
        if isinstance(value, dict):
            setattr(index, name, Counted({key: Counted(v) if isinstance(v, dict) else v for key, v in value.items()}))
    Counted.looked_at = 0
    assert index.forget({1}) == set(chain)
    assert Counted.looked_at <= 12 * len(chain)
    assert len(index) == len(others)
