"""Counters that a layer asks for first while a CUDA graph is captured: no replay of any graph writes to them."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.lang.jit import counters_of
from photon_grpc.runner.graphs import CudaCapture

pytestmark = pytest.mark.gpu


def test_replays_of_other_graphs_leave_counters_zero() -> None:
    capture = CudaCapture()
    weights = [torch.zeros(1, device="cuda") for _ in range(50)]
    taken: list[torch.Tensor] = []

    def large() -> torch.Tensor:
        # Temporary memory, free for the next graph once the function returns.
        return torch.stack([torch.full((4096,), one, device="cuda") for one in range(200)]).sum(0)

    def small() -> torch.Tensor:
        taken[:] = [counters_of(weight, 40) for weight in weights]
        return torch.stack([counters.sum() for counters in taken])

    replay_large, _ = capture(large)
    replay_small, sums = capture(small, lambda: counters_of(weights[0], 40))
    for _ in range(2):
        replay_large()
        replay_small()
        assert not sums.any()
        assert all(not counters.any() for counters in taken)
