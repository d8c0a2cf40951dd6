"""Sums of squares and of slices in the interpreter: the bits of their references, whoever makes them."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import slices
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Rotation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", [16, 48, 96, 896, 960])
def test_squares_are_summed_as_in_torch(hidden: int, dtype: torch.dtype) -> None:
    h, partial = torch.randn(3, hidden).to(dtype), torch.full((4, hidden // 16), torch.nan)
    squares.launch(h, partial[:3])
    assert torch.equal(partial[:3], squares.reference(h))
    assert partial[3:].isnan().all()
    expected = h.double().square().sum(1).float()
    torch.testing.assert_close(squares.total_reference(h), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("hidden", [16, 80, 960])
def test_heads_are_scaled_alike_by_a_row_and_by_its_sums(hidden: int) -> None:
    qkv, h = torch.randn(3, 8 * 32), torch.randn(3, hidden) * 3
    place = torch.arange(3)
    rotation = Rotation(torch.randn(8, 16), torch.randn(8, 16), place, place)
    results = []
    for partial in (None, squares.reference(h)):
        q, cache = torch.zeros(3, 4 * 32), torch.zeros(1, 1, 2, 2, 8, 32)
        rotate_store.launch(qkv, h, None, 1e-5, HeadOutput(q, cache, 0, rotation), partial)
        results.append(torch.cat((q.flatten(), cache.flatten())))
    assert torch.equal(*results)


@pytest.mark.parametrize("num_slices", [2, 3, 4])
def test_heads_of_slices_are_those_of_their_sum(num_slices: int) -> None:
    sums = torch.randn(num_slices, 3, 8 * 32)
    whole = sums[0].clone()
    for part in sums[1:]:
        whole += part
    place = torch.arange(3)
    rotation = Rotation(torch.randn(8, 16), torch.randn(8, 16), place, place)
    results = []
    for qkv in (sums, whole):
        q, cache = torch.zeros(3, 4 * 32), torch.zeros(1, 1, 2, 2, 8, 32)
        rotate_store.launch(qkv, None, None, 1e-5, HeadOutput(q, cache, 0, rotation))
        results.append(torch.cat((q.flatten(), cache.flatten())))
    assert torch.equal(*results)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_slices", [2, 4])
def test_slices_are_added_in_order(num_slices: int, bias: bool) -> None:
    sums, b = torch.randn(num_slices, 3, 1100), torch.randn(1100).half() if bias else None
    mine = torch.randn(3, 1100).half()
    theirs = mine.clone()
    slices.add_launch(mine, sums, b)
    slices.add_reference(theirs, sums, b)
    assert torch.equal(mine, theirs)
