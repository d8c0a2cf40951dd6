"""Weights and rows in 8 bits, and their products in float64."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.linear import quantize
from photon_grpc.kernels.linear.products8 import Weight8

#: Name -> type, and whether groups and blocks of 128 have scales.
FORMATS = {"w8a8": (torch.int8, False), "fp8": (torch.float8_e4m3fn, False), "fp8-block": (torch.float8_e4m3fn, True)}
each_format = pytest.mark.parametrize("name", FORMATS)


def weight_of(name: str, w: torch.Tensor) -> Weight8:
    """Return W [N, K] in 8 bits; of blocks, N is a multiple of 128."""
    kind, has_blocks = FORMATS[name]
    n, k = w.shape
    if not has_blocks:
        values, scales, _ = quantize.reference(w, kind)
        return Weight8(values, scales[None])
    blocks = torch.nn.functional.pad(w, (0, -k % 128)).view(n // 128, 128, -1, 128).permute(2, 0, 1, 3)
    scales = blocks.abs().amax((2, 3)) / quantize.LIMITS[kind]
    whole = _spread(scales, n, k)
    return Weight8((w / whole).to(kind), scales.contiguous())


def _spread(scales: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return scales [1, N] or [K / 128, N / 128] as [N, K]."""
    if scales.shape[0] == 1 and scales.shape[1] == n:
        return scales.t().expand(n, k)
    return scales.t().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :k]


def exact(x: torch.Tensor, weight: Weight8) -> torch.Tensor:
    """Return the product of the quantized numbers and their scales in float64."""
    values, scales, _ = weight
    n, k = values.shape
    has_blocks = scales.shape[1] != n
    rows = quantize.reference(x, values.dtype, grouped=has_blocks)
    of_x = rows.scales.double().reshape(len(x), -1)
    of_x = of_x.repeat_interleave(128, 1)[:, :k] if has_blocks else of_x
    return (rows.values.double() * of_x) @ (values.double() * _spread(scales.double(), n, k)).t()
