"""RMSNorm: y = w · x / sqrt(mean(x²) + eps) over the last dimension."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from photon_grpc.kernels import Kernels
from photon_grpc.layers.parameter_owner import Target


class RMSNorm:
    """RMSNorm with a weight w [size], `name` in the checkpoint."""

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype, kernels: Kernels) -> None:
        self.name = name
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype, device="meta")
        self._norm = kernels.rms_norm
        self._add_norm = kernels.add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., size] -> the same shape."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add [T, size] twice -> (norm of the sum, sum)."""
        return self._add_norm(x, residual, self.weight, self.eps)

    @property
    def num_parameters(self) -> int:
        return self.weight.numel()

    def allocate(self, device: torch.device) -> None:
        self.weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device=device)

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight, center=1.0)

    def after_load(self) -> None:
        """Do nothing: the weight is used as it is stored."""
