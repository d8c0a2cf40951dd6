"""What experts compute, in float64, and what a work list holds."""

from __future__ import annotations

import torch

from photon_grpc.config.quantization import WeightFormat
from photon_grpc.kernels.linear.weight import WeightKind
from photon_grpc.kernels.moe.route import Routing
from photon_grpc.kernels.moe.stacks import Stack, Stacks
from photon_grpc.layers.quantization.rounding import quantized


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
        gate, up = (x[token].double() @ stacks.gate_up.matrix(number).double().t()).chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
        parts[token, place] = y @ stacks.down.matrix(number).double().t()
    return (parts * routing.weights.double()[:, :, None]).sum(1)


def rounded(stacks: Stacks, form: WeightFormat, dtype: torch.dtype) -> Stacks:
    """Return the stacks quantized as a checkpoint is when it is read, with zeros if the form has some."""
    found = []
    for stack in stacks:
        of_scales = torch.float32 if form.activation_bits == 8 else dtype
        codes = [quantized([("w", slice(0, len(w)))], w, form, of_scales) for w in stack.values]
        values, scales = (torch.stack(each) for each in zip(*(code[:2] for code in codes), strict=True))
        if form.activation_bits == 8:
            found.append(Stack(values, scales, is_eight=True))
            continue
        zeros = (
            (torch.arange(scales.numel(), device=scales.device) % 16).view(scales.shape).to(dtype)
            if form.has_zeros
            else None
        )
        found.append(Stack(values, scales, zeros, WeightKind(form.bits, form.block[1], form.has_zeros)))
    return Stacks(*found)
