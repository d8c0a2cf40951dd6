"""The buffers of one step through a chain of fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_grpc.kernels.rotary.rotate_store import Rotation


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The buffers of M tokens; each has memory for `bucket` rows if that is more: kernels read whole tiles.

    bucket: that of M, by `layers/gemm.py`. h: [M, hidden_size], the residual stream. q, attended: [M, Hq · D],
    attention's input and result. y: [M, intermediate_size]. rotation: that of the M tokens. counters: int32, zero
    before and after each kernel that counts its programs.
    """

    bucket: int
    h: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
    y: torch.Tensor
    rotation: Rotation
    counters: torch.Tensor

    def take(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Store x + residual in h, unless they are there already."""
        if residual is not None:
            torch.add(x, residual, out=self.h)
        elif x is not self.h:
            self.h.copy_(x)
