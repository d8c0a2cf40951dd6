"""Weights and activations of 8 bits: int8 or e4m3 products, with a scale of each row of x and of each row of W.

    s_x = max(max |x| / L, 2^-40),  q_x = round(x / s_x)          L = 127 for int8, 448 for e4m3
    y = round((Σ q_x · q_w) · s_x · s_w) + b
    y = round(Σ_c (Σ q_x · q_w over 128 columns) · (s_x[c] · s_w[c])) + b       with scales of blocks

Sums of int8 are exact. Those of e4m3 are float32 sums of 128 columns, added forwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.config.quantization import BLOCK
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.quantization.quantized import Quantized

#: The least scale: rows of zeros are divided by it.
_TINY = 2.0**-40
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: Columns of int8 products whose sums float32 holds exactly: 127 · 128 · 1024 < 2^24.
_EXACT = 1024


class Weight8(NamedTuple):
    """Values int8 or e4m3 [N, K], scales float32 [1, N] or [K / 128, N / 128]."""

    values: torch.Tensor
    scales: torch.Tensor


class EightBits(Quantized):
    """A format whose `linear.weight` is a Weight8."""

    def after_load(self, linear: Linear) -> None:
        values, scales, _ = self.source.codes(linear)
        linear.weight = Weight8(values, scales)

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        y = _block_product(x, linear.weight) if self.source.form.block[0] > 1 else _product(x, linear.weight)
        return y if linear.bias is None else y.add_(linear.bias)


def _product(x: torch.Tensor, weight: Weight8) -> torch.Tensor:
    """Return x Wᵀ [T, N] in x's dtype."""
    values, scales = _quantized(x.float(), weight.values.dtype)
    is_exact = weight.values.dtype == torch.int8
    sums = torch.zeros(len(x), len(weight.values), dtype=torch.int32 if is_exact else torch.float32, device=x.device)
    width = _EXACT if is_exact else BLOCK
    for part, of_weight in zip(values.split(width, 1), weight.values.split(width, 1), strict=True):
        sums += (part @ of_weight.float().t()).to(sums.dtype)
    return (sums.float() * scales * weight.scales).to(x.dtype)


def _block_product(x: torch.Tensor, weight: Weight8) -> torch.Tensor:
    """Return x Wᵀ [T, N] in x's dtype."""
    rows = len(weight.values)
    y = torch.zeros(len(x), rows, device=x.device)
    parts = zip(x.float().split(BLOCK, 1), weight.values.split(BLOCK, 1), weight.scales, strict=True)
    for part, of_weight, of_rows in parts:
        values, scales = _quantized(part, weight.values.dtype)
        y += (values @ of_weight.float().t()) * (scales * of_rows.repeat_interleave(BLOCK)[:rows])
    return y.to(x.dtype)


def _quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of x in 8 bits, as float32 numbers, and their scales [T, 1]."""
    limit = _LIMITS[dtype]
    scales = (x.abs().amax(1, keepdim=True) / limit).clamp(min=_TINY)
    numbers = (x / scales).clamp(-limit, limit)
    return numbers.round() if dtype == torch.int8 else numbers.to(dtype).float(), scales
