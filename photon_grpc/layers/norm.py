"""RMSNorm: y = w · x / sqrt(mean(x²) + eps) over the last dimension.

RMSNorm rounds before it multiplies by w, as Llama does; the others once, after it, as OLMo and Gemma do.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels import Kernels
from photon_grpc.layers.parameter_owner import OneWeight


class RMSNorm(OneWeight):
    """RMSNorm with a weight w [size], `name` in the checkpoint."""

    center = 1.0

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(name, (size,), dtype)
        self.eps = eps
        self._norm = kernels.rms_norm
        self._add_norm = kernels.add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., size] -> the same shape."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add [T, size] twice -> (norm of the sum, sum)."""
        return self._add_norm(x, residual, self.weight, self.eps)


class OnceRoundedRMSNorm(RMSNorm):
    """RMSNorm that multiplies by w in float32 and rounds once."""

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(name, size, eps, dtype=dtype, kernels=kernels)
        self._norm = kernels.rms_norm_once
        self._add_norm = kernels.add_rms_norm_once


class OffsetRMSNorm(OnceRoundedRMSNorm):
    """RMSNorm with 1 + w for w, in float32 whatever the dtype of the model."""

    center = 0.0

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(name, size, eps, dtype=torch.float32, kernels=kernels)

    def after_load(self) -> None:
        """Add 1 to the stored weight."""
        self.weight.add_(1.0)
