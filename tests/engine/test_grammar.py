"""The masks of one step, bit for bit."""

from __future__ import annotations

import pytest

from photon_grpc.core.batch import Batch
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.grammar import ConstrainedOutputs, MaskMemory
from tests.engine.fakes import MASK_BYTES, VOCAB
from tests.engine.tables import END, Table, TableGrammars

#: Ids of class 1, then one of class 2, then only the end.
PAIR = Table(({1: 1}, {2: 2}, {}), frozenset({2}))
ALL = set(range(8 * MASK_BYTES))
ONES, TWOS = set(range(1, END, 4)), set(range(2, END, 4))


def sequence(name: str) -> Sequence:
    request = Request(name, (7,), SamplingParams(), StopParams(9, stop_token_ids=(END, 5)), 0.0)
    return Sequence(request, 0, 0, 0, (0.0, 1))


def sets_of(masks: memoryview) -> list[set[int]]:
    words = [masks[at : at + MASK_BYTES] for at in range(0, len(masks), MASK_BYTES)]
    return [{bit for bit in ALL if mask[bit // 8] >> bit % 8 & 1} for mask in words]


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ((1, 2, 4), [ONES, TWOS, ALL, ALL]),  # Only the end may follow [1, 2].
        ((9, 3, 2), [ONES, TWOS, ALL, ALL]),  # 3 may not follow.
        ((5, 2, 2), [ONES, ALL, ALL, ALL]),  # 5 is of class 1, and ends the output.
        ((-1, -1, -1), [ONES, ALL, ALL, ALL]),
        ((), [ONES, ALL, ALL, ALL]),  # The launch has failed.
    ],
)
def test_masks_follow_the_drafts_up_to_the_first_that_ends_or_may_not_follow(
    drafts: tuple[int, ...], expected: list[set[int]]
) -> None:
    constraints = ConstrainedOutputs(TableGrammars({"a": PAIR}), VOCAB)
    seq = sequence("a")
    assert constraints.begin([seq]) is None
    batch = Batch(1, (1,), (4,), (4,), drafts=3, masked=(0,))
    masks, failures = constraints.masks(batch, [seq], drafts)
    assert sets_of(masks) == expected and not failures
    assert constraints.matchers[seq].ids == []


def test_masks_of_earlier_steps_that_lie_in_the_same_memory_are_not_seen() -> None:
    constraints = ConstrainedOutputs(TableGrammars({"a": PAIR}), VOCAB)
    seq = sequence("a")
    constraints.begin([seq])
    masks, _ = constraints.masks(Batch(1, (1,), (1,), (1,), masked=(0,)), [seq], ())
    assert sets_of(masks) == [ONES]
    constraints.forget(seq)
    masks, _ = constraints.masks(Batch(2, (1,), (1,), (1,), masked=(0,)), [seq], ())
    assert sets_of(masks) == [ALL]


def test_memory_of_masks_comes_round_after_as_many_steps_and_grows_with_the_largest() -> None:
    sizes: list[int] = []

    def allocate(num_bytes: int) -> memoryview:
        sizes.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    memory = MaskMemory(2, allocate)
    first, second = memory.next(4), memory.next(4)
    first[0], second[0] = 1, 2
    third = memory.next(3)
    assert bytes(third) == b"\1\0\0" and sizes == [4, 4]
    assert len(memory.next(5)) == 5 and len(memory.next(4)) == 4 and sizes == [4, 4, 8]


def test_masks_lie_k_plus_one_to_a_row_and_are_ones_for_a_row_without_matcher() -> None:
    constraints = ConstrainedOutputs(TableGrammars({"a": PAIR, "c": PAIR}), VOCAB)
    free, a, gone, c = (sequence(name) for name in ("free", "a", "gone", "c"))
    for seq in (free, a, c):
        constraints.begin([seq])
    constraints.advance(c, 1)
    batch = Batch(1, (1, 2, 3, 4), (1, 1, 3, 2), (1, 1, 3, 2), drafts=2, masked=(1, 2, 3))
    masks, _ = constraints.masks(batch, [free, a, gone, c], (-1, -1, 1, 1, 3, -1))
    # `a` has no drafts, `c` one that may not follow.
    assert sets_of(masks) == [ONES, ALL, ALL, ALL, ALL, ALL, TWOS, ALL, ALL]
