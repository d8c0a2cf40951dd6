"""Counters of kernels whose last program adds or chooses."""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang.jit import counters_of


def test_weights_of_models_that_run_side_by_side_share_no_counters() -> None:
    first, second = torch.empty(16, 8), torch.empty(16, 8)
    counters = counters_of(first, 4)
    assert counters.tolist() == [0] * 4 and counters.dtype == torch.int32
    # Graphs go on reading those that they were captured with.
    assert counters_of(first.view(8, 16), 4) is counters
    assert counters_of(second, 4).data_ptr() != counters.data_ptr()
