"""What filters keep, searched digit by digit in the interpreter: the same set as by sorting."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import cutoff


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("banned", [False, True])
@pytest.mark.parametrize("num_columns", [50, 1024, 3000])
def test_the_same_tokens_are_kept(num_columns: int, banned: bool, ties: bool) -> None:
    torch.manual_seed(num_columns)
    scaled = torch.randn(7, num_columns) * 3
    if ties:
        scaled = scaled.round()
        scaled[0, :5] = -0.0
    if banned:
        scaled[:, : num_columns // 2] = -torch.inf
    top_k = torch.tensor([-1, 1, 5, 40, num_columns, 7, -1])
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.95, 0.3, 1.0, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0, 0.2, 0.0, 0.1])
    mine = cutoff.launch(scaled, top_k, top_p, min_p)
    theirs = cutoff.reference(scaled, top_k, top_p, min_p)
    assert torch.equal(scaled >= mine[:, None], scaled >= theirs[:, None])


def test_a_row_that_is_not_finite_ends() -> None:
    scaled = torch.randn(2, 60)
    scaled[0, 3] = torch.nan
    cutoff.launch(scaled, torch.tensor([4, 4]), torch.tensor([0.9, 0.9]), torch.tensor([0.0, 0.0]))
