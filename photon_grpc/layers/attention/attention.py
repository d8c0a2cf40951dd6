"""Grouped-query attention: project, normalise heads where the family does, rotate, store keys and values, attend, project."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_grpc.core.kv import KVSpec
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.attention import write_kv
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.leaf import Leaf
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm over every head of the queries and of the keys."""

    q: RMSNorm
    k: RMSNorm


class Attention:
    """Hq query heads share Hkv key-value heads of head_dim D; `layer` is this layer's plane in the cache."""

    def __init__(
        self,
        layer: int,
        num_heads: int,
        spec: KVSpec,
        *,
        qkv: Linear,
        output: Linear,
        rotary: RotaryEmbedding,
        kernels: Kernels,
        qk_norm: QKNorm | None = None,
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.qkv = qkv
        self.output = output
        self.rotary = rotary
        self.qk_norm = qk_norm
        self._heads = (num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._qkv_shape = (sum(self._heads), spec.head_dim)
        self._kernel = kernels.write_kv
        self._write = self._write_rows if rotary.cos.device.type == "cpu" else self._write_slots
        self._paged_attention = kernels.paged_attention

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; writes this layer's keys and values of the T tokens before any of them attends."""
        num_tokens = x.shape[0]
        q, k, v = self.qkv(x).view(num_tokens, *self._qkv_shape).split(self._heads, dim=1)
        if self.qk_norm is not None:
            q, k = self.qk_norm.q(q), self.qk_norm.k(k)
        q, k = self.rotary(q, k, ctx)
        self._write(k, v, ctx)
        attended = self._paged_attention(q, ctx.cache, self.layer, ctx.attention)
        return self.output(attended.view(num_tokens, self.output.in_features))

    def _write_slots(self, k: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> None:
        self._kernel(k, v, ctx.cache, self.layer, ctx.slot_mapping)

    def _write_rows(self, k: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> None:
        """Where the step's tokens go is worked out in the first layer."""
        places = ctx.memo.get(write_kv)
        if places is None:
            places = ctx.memo[write_kv] = write_kv.rows(ctx.slot_mapping, ctx.cache)
        write_kv.write_rows(k, v, ctx.cache, self.layer, places)

    def leaves(self) -> tuple[Leaf, ...]:
        norms = () if self.qk_norm is None else (self.qk_norm.q, self.qk_norm.k)
        return (self.qkv, *norms, self.output)
