"""Rotary position embedding: angle(position, i) = position · inv_freq[i], inv_freq[i] = theta^(-2i/D) before scaling.

linear:  inv_freq / factor
llama3:  by wavelength 2π / inv_freq against the original context L: shorter than L / high_freq_factor unchanged, longer
         than L / low_freq_factor divided by factor, in between interpolated linearly in L / wavelength
yarn:    between inv_freq and inv_freq / factor by the rotations in the original context; cos and sin times
         attention_factor
longrope: inv_freq[i] / short_factor[i], or long_factor[i]; cos and sin times attention_factor

A model in which longrope's short factors are for contexts up to L, the long ones for longer contexts, has one of them:
the long ones if it may have a context above L. transformers chooses anew in every call, by the longest sequence of the
batch, so that keys of one sequence may be rotated in two ways.
"""

from __future__ import annotations

import math

import torch

from photon_grpc.config.rope import RopeSpec
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.rotary import rotary
from photon_grpc.layers.context import StepContext


class RotaryEmbedding:
    """Rotation of queries and keys by tables of cos and sin [max_model_len, D/2]; one object for all its layers."""

    def __init__(
        self, spec: RopeSpec, head_dim: int, max_model_len: int, *, device: torch.device, kernels: Kernels
    ) -> None:
        frequencies = inverse_frequencies(spec, spec.rotated(head_dim), max_model_len)
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
        self.cos = (angles.cos() * spec.attention_factor).to(device)
        self.sin = (angles.sin() * spec.attention_factor).to(device)
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


class PartialRotaryEmbedding(RotaryEmbedding):
    """Rotation of the first numbers of each head, by tables of half as many columns; the others stay as they are."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = 2 * self.cos.shape[1]
        self._apply(q[..., :rotated], k[..., :rotated], ctx)
        return q, k


class NoRotaryEmbedding(RotaryEmbedding):
    """The identity, for layers without positions. Its tables are empty."""

    def __init__(self, device: torch.device) -> None:
        self.cos = self.sin = torch.empty(0, 0, device=device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k


def rotary_embedding(
    spec: RopeSpec | None, head_dim: int, max_model_len: int, *, device: torch.device, kernels: Kernels
) -> RotaryEmbedding:
    """Return the rotary embedding of layers with these parameters; None: they have none."""
    if spec is None:
        return NoRotaryEmbedding(device)
    kind = RotaryEmbedding if spec.rotated(head_dim) == head_dim else PartialRotaryEmbedding
    return kind(spec, head_dim, max_model_len, device=device, kernels=kernels)


def inverse_frequencies(spec: RopeSpec, rotated: int, max_model_len: int) -> torch.Tensor:
    """Return float32 [rotated / 2] on the CPU, in transformers' order of operations."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    if spec.kind == "longrope":
        factors = spec.long_factor if spec.is_long(max_model_len) else spec.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "default":
        return frequencies
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "yarn":
        return _yarn(spec, rotated)
    return _llama3(spec, frequencies)


def _yarn(spec: RopeSpec, rotated: int) -> torch.Tensor:
    frequencies = spec.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)

    def pair(rotations: float) -> float:
        """Return the number of the pair that turns so often in the original context."""
        turns = math.log(spec.original_max_position_embeddings / (rotations * 2 * math.pi))
        return rotated * turns / (2 * math.log(spec.theta))

    low, high = pair(spec.beta_fast), pair(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    stays = 1 - ramp
    return 1.0 / (spec.factor * frequencies) * (1 - stays) + 1.0 / frequencies * stays


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    original = spec.original_max_position_embeddings
    low, high = spec.low_freq_factor, spec.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / spec.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / spec.factor + smooth * scaled
    is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_between, between, scaled)
