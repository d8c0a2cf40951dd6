"""What experts compute, in float64, and what a work list holds."""

from __future__ import annotations

import torch

from photon_grpc.kernels.moe.route import Routing
from photon_grpc.kernels.moe.stacks import Stacks


def check_work(routing: Routing, num_experts: int) -> None:
    """Every pair of a token and a place is in the list once, at its expert, and nothing else is."""
    assert routing.work is not None
    work = [column.cpu() for column in routing.work]
    entries, found = int(work[3]), []
    assert entries <= work[0].shape[0]
    for expert, first, count in zip(*(column[:entries].tolist() for column in work[:3]), strict=True):
        assert 0 <= expert < num_experts and first < count
        pairs = work[4][expert, first : min(first + routing.block, count)].tolist()
        found += [(pair, expert) for pair in pairs]
    expected = [(pair, expert) for pair, expert in enumerate(routing.experts.flatten().tolist()) if expert >= 0]
    assert sorted(found) == expected


def exact(x: torch.Tensor, routing: Routing, stacks: Stacks) -> torch.Tensor:
    """Return the sums of each token in float64, expert by expert."""
    parts = torch.zeros((*routing.experts.shape, x.shape[1]), dtype=torch.float64, device=x.device)
    for number in range(stacks.gate_up.shape[0]):
        token, place = (routing.experts == number).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ stacks.gate_up.values[number].double().t()).chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
        parts[token, place] = y @ stacks.down.values[number].double().t()
    return (parts * routing.weights.double()[:, :, None]).sum(1)
