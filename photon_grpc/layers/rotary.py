"""Rotary position embedding: angle(position, i) = position · inv_freq[i], inv_freq[i] = theta^(-2i/D) before scaling.

linear:  inv_freq / factor
llama3:  by wavelength 2π / inv_freq against the original context L: shorter than L / high_freq_factor unchanged, longer
         than L / low_freq_factor divided by factor, in between interpolated linearly in L / wavelength
"""

from __future__ import annotations

import math

import torch

from photon_grpc.config.rope import RopeSpec
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.rotary import rotary
from photon_grpc.layers.context import StepContext


class RotaryEmbedding:
    """Rotation of queries and keys by tables of cos and sin [max_model_len, D/2]; one object for all layers."""

    def __init__(
        self, spec: RopeSpec, head_dim: int, max_model_len: int, *, device: torch.device, kernels: Kernels
    ) -> None:
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), inverse_frequencies(spec, head_dim))
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)
        self._rotary = kernels.rotary
        self._apply = self._with_rows if device.type == "cpu" else self._with_tables

    def __call__(self, q: torch.Tensor, k: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [T, Hq, D], k [T, Hkv, D] at ctx.positions, below max_model_len; both may be overwritten."""
        return self._apply(q, k, ctx)

    def _with_tables(self, q: torch.Tensor, k: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotary(q, k, self.cos, self.sin, ctx.positions)

    def _with_rows(self, q: torch.Tensor, k: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate by the rows of the tables, which are gathered in the first layer for all layers."""
        rows = ctx.memo.get(self)
        if rows is None:
            rows = ctx.memo[self] = rotary.rows(self.cos, self.sin, ctx.positions)
        return rotary.rotate(q, k, *rows)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return float32 [head_dim / 2] on the CPU, in transformers' order of operations."""
    frequencies = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if spec.kind == "default":
        return frequencies
    if spec.kind == "linear":
        return frequencies / spec.factor
    return _llama3(spec, frequencies)


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    original = spec.original_max_position_embeddings
    low, high = spec.low_freq_factor, spec.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / spec.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / spec.factor + smooth * scaled
    is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_between, between, scaled)
