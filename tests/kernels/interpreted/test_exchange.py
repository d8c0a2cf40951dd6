"""Parts that ranks push to each other, in the interpreter: all ranks push, then all take, planes used again."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.jit import cdiv
from photon_grpc.kernels.linear import exchange

HIDDEN, ROWS = 1040, 5


def parts_of(size: int, num_rows: int, turn: int) -> torch.Tensor:
    parts = torch.randn(size, num_rows, HIDDEN, generator=torch.Generator().manual_seed(turn))
    parts[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    # The word of EMPTY, as a number of one rank.
    parts.view(torch.int32)[-1, -1, 7] = exchange.EMPTY
    return parts


@pytest.mark.each_value
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_rank_adds_the_parts_of_all_in_their_order(size: int, has_bias: bool) -> None:
    inboxes = tuple(torch.full((2, size - 1, ROWS, HIDDEN), exchange.EMPTY, dtype=torch.int32) for _ in range(size))
    bias = torch.randn(HIDDEN).half() if has_bias else None
    for turn in (2, 3, 5):
        num_rows = (turn + 2) % ROWS + 1
        parts, start = parts_of(size, num_rows, turn), torch.randn(num_rows, HIDDEN).half()
        meta = exchange.config() | {"HIDDEN": HIDDEN, "ROWS": ROWS, "SIZE": size}
        plane = tuple(inbox[turn % 2] for inbox in inboxes)
        grid = num_rows, cdiv(HIDDEN, meta["BLOCK"])
        for rank in range(size):
            exchange.push_kernel[grid](parts[rank], plane, RANK=rank, **meta)
        expected = start.clone()
        exchange.reference(expected, parts, bias)
        for rank in range(size):
            h, sums = start.clone(), torch.full((num_rows, HIDDEN // 16), 7.0)
            exchange.exchange_kernel[grid](
                h, parts[rank], bias, sums, plane, RANK=rank, PUSHES=False, LOOKS=9, PDL=False, **meta
            )
            assert torch.equal(h.isnan(), expected.isnan())
            assert torch.equal(h.nan_to_num(), expected.nan_to_num())
            torch.testing.assert_close(sums, squares.reference(expected), rtol=0, atol=0, equal_nan=True)
        assert all((inbox == exchange.EMPTY).all() for inbox in inboxes)
