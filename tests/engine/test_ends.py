"""Ends in a mask, bit for bit."""

from __future__ import annotations

import pytest

from photon_grpc.engine.constraints.ends import EndIds

NUM_IDS = 32


def mask_of(ids: set[int]) -> memoryview:
    return memoryview(bytearray(sum(1 << id for id in ids).to_bytes(NUM_IDS // 8, "little")))


@pytest.mark.parametrize(("ids", "matcher_ids"), [((3,), (3,)), ((3, 4, 20), (4, 31)), ((), (4,)), ((4, 5), ())])
@pytest.mark.parametrize("is_satisfied", [False, True])
@pytest.mark.parametrize("others", [set(), {1, 9}, {1, 3, 4, 20, 31}, set(range(NUM_IDS))])
def test_either_all_end_ids_are_allowed_or_none(
    ids: tuple[int, ...], matcher_ids: tuple[int, ...], is_satisfied: bool, others: set[int]
) -> None:
    mask = mask_of(others)
    EndIds(ids, matcher_ids).correct(mask, is_satisfied)
    assert mask == mask_of(others - {*ids, *matcher_ids} | (set(ids) if is_satisfied else set()))


@pytest.mark.parametrize("allowed", range(NUM_IDS))
def test_the_end_bits_are_those_of_all_end_ids(allowed: int) -> None:
    ends, mask = EndIds((3, 4, 20), (4, 31)), mask_of({allowed})
    assert any(mask[byte] & bits for byte, bits in ends.signs) == (allowed in {3, 4, 20, 31})


def test_masks_of_a_matcher_without_ends_are_inconclusive() -> None:
    assert EndIds((3,), ()).signs == ()
