"""The masks of one step, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from photon_grpc.core.batch import Batch
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs, MaskMemory, Matcher
from tests.engine.fakes import MASK_BYTES, VOCAB
from tests.engine.tables import END, OneByOne, Panic, Table, TableGrammars

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


def test_memory_of_masks_is_reused_in_rotation_and_grows_with_the_largest() -> None:
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


def test_each_row_has_k_plus_one_masks_which_are_ones_without_a_matcher() -> None:
    constraints = ConstrainedOutputs(TableGrammars({"a": PAIR, "c": PAIR}), VOCAB)
    free, a, gone, c = (sequence(name) for name in ("free", "a", "gone", "c"))
    for seq in (free, a, c):
        constraints.begin([seq])
    constraints.advance(c, 1)
    batch = Batch(1, (1, 2, 3, 4), (1, 1, 3, 2), (1, 1, 3, 2), drafts=2, masked=(1, 2, 3))
    masks, _ = constraints.masks(batch, [free, a, gone, c], (-1, -1, 1, 1, 3, -1))
    # `a` has no drafts, `c` one that may not follow.
    assert sets_of(masks) == [ONES, ALL, ALL, ALL, ALL, ALL, TWOS, ALL, ALL]


def test_masks_of_the_same_rows_are_prepared_once_until_an_output_begins_or_ends() -> None:
    grammars = TableGrammars(dict.fromkeys("abc", PAIR))
    constraints = ConstrainedOutputs(grammars, VOCAB)
    a, b, c = (sequence(name) for name in "abc")
    num_steps = 0

    def masks(*rows: Sequence, drafts: int = 0) -> list[set[int]]:
        nonlocal num_steps
        num_steps += 1
        ones = (1,) * len(rows)
        batch = Batch(num_steps, ones, ones, ones, drafts=drafts, masked=tuple(range(len(rows))))
        return sets_of(constraints.masks(batch, list(rows), ())[0])

    constraints.begin([a])
    constraints.begin([b])
    assert masks(a, b) == [ONES, ONES]
    constraints.advance(a, 1)
    assert masks(a, b) == [TWOS, ONES] and grammars.num_fillers == 1
    assert masks(b, a) == [ONES, TWOS] and grammars.num_fillers == 2
    assert masks(b, a, drafts=1) == [ONES, ALL, TWOS, ALL] and grammars.num_fillers == 3
    constraints.forget(sequence("free"))
    masks(b, a, drafts=1)
    assert grammars.num_fillers == 3, "an output without a constraint has ended"
    constraints.begin([sequence("free")])
    masks(b, a, drafts=1)
    assert grammars.num_fillers == 3, "another has begun"
    constraints.forget(b)
    assert masks(b, a) == [ALL, TWOS] and masks(a) == [TWOS] and grammars.num_fillers == 5
    constraints.begin([b])
    constraints.begin([c])
    assert masks(b, a) == [ONES, TWOS] and masks(b, a, c) == [ONES, TWOS, ONES] and grammars.num_fillers == 7
    constraints.begin([a])
    assert masks(b, a, c) == [ONES, ONES, ONES] and grammars.num_fillers == 8


def test_ended_outputs_are_released() -> None:
    constraints = ConstrainedOutputs(TableGrammars({"a": PAIR}), VOCAB)
    free, a = sequence("free"), sequence("a")
    num_known = sys.getrefcount(free), sys.getrefcount(a)
    constraints.begin([a])
    constraints.masks(Batch(1, (1,), (1,), (1,), masked=(0,)), [a], ())
    constraints.masks(Batch(2, (1, 2), (1, 1), (1, 1), masked=(0, 1)), [free, a], ())
    assert sys.getrefcount(free) == num_known[0]
    constraints.masks(Batch(3, (1,), (1,), (1,), masked=(0,)), [a], ())
    constraints.forget(a)
    assert sys.getrefcount(a) == num_known[1]


def test_where_masks_cannot_be_prepared_outputs_end_and_no_others() -> None:
    class Broken(TableGrammars):
        def filler(self, matchers: Mapping[int, Matcher], mask_bytes: int) -> OneByOne:
            raise Panic("no filler")

    constraints = ConstrainedOutputs(Broken({"a": PAIR}), VOCAB)
    free, a = sequence("free"), sequence("a")
    constraints.begin([a])
    batch = Batch(1, (1, 2), (1, 1), (1, 1), masked=(0, 1))
    masks, failures = constraints.masks(batch, [free, a], ())
    assert sets_of(masks) == [ALL, ALL] and [*failures] == [a]
