"""The gated feed-forward block: down(silu(gate(x)) · up(x)), or with gelu for silu."""

from __future__ import annotations

import torch

from photon_grpc.kernels import Kernels
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.parameter_owner import ParameterOwner


class GatedMLP:
    """A gated feed-forward block; gate and up are one merged Linear, gate first."""

    def __init__(self, gate_up: Linear, down: Linear, kernels: Kernels) -> None:
        self.gate_up = gate_up
        self.down = down
        self._product = kernels.swiglu

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden]."""
        return self.down(self._product(self.gate_up(x, ctx)), ctx)

    def leaves(self) -> tuple[ParameterOwner, ...]:
        return self.gate_up, self.down


class GegluMLP(GatedMLP):
    """A gated feed-forward block with the tanh form of gelu."""

    def __init__(self, gate_up: Linear, down: Linear, kernels: Kernels) -> None:
        super().__init__(gate_up, down, kernels)
        self._product = kernels.geglu
