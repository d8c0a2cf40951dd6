"""A Linear outside of a chain of fused kernels, multiplied by its method's kernels."""

from __future__ import annotations

import torch

from photon_grpc.kernels.linear import tiles
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import Plain, bucket
from photon_grpc.layers.linear import Linear

_PLAIN = Plain()


class KernelLinear(Linear):
    """A Linear whose method's kernels multiply it where there are some.

    Args:
        linear: a loaded one.
        device: where it is.
    """

    def __init__(self, linear: Linear, device: torch.device) -> None:
        self.__dict__.update(vars(linear))
        # Zero before and after every kernel that counts its programs.
        self.counters = torch.zeros(linear.out_features // 16 + 1, dtype=torch.int32, device=device)
        found = {rows: linear.gemm(rows, _PLAIN) for rows in (0, *tiles.BUCKETS)}
        self._gemms = {rows: gemm for rows, gemm in found.items() if gemm is not None}

    def __call__(self, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        gemm = self._gemms.get(bucket(x.shape[0]))
        if gemm is None or not len(x):
            return super().__call__(x, ctx)
        y: torch.Tensor = gemm(self, x)
        return y if self.bias is None else y + self.bias
