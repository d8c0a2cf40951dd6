"""Grouped-query attention: project, normalise heads where they have norms, rotate, store, attend, project."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_grpc.core.kv import LayerKV
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang.page_scales import PageScales
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parameter_owner import ParameterOwner
from photon_grpc.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class QKNorm:
    """The norms of the queries and of the keys: of every head, but in ProjectionNormAttention of all heads."""

    q: RMSNorm
    k: RMSNorm


class Attention:
    """Hq query heads share Hkv key-value heads of head_dim D."""

    def __init__(
        self,
        spec: AttentionSpec,
        kv: LayerKV,
        *,
        qkv: Linear,
        output: Linear,
        rotary: RotaryEmbedding,
        qk_norm: QKNorm | None = None,
    ) -> None:
        #: Its number among `StepContext.kv` and its row in the pages there, set by the decoder, which knows all layers.
        self.place = self.layer = 0
        self.kv = kv
        self.qkv = qkv
        self.output = output
        self.rotary = rotary
        self.qk_norm = qk_norm
        self.spec = spec
        #: The constants of its pages where they are of 8 bits, set by the builder.
        self.scales: PageScales | None = None
        #: Its key-value heads among those of the model; set by the builder.
        self.kv_heads = slice(0, kv.format.heads)
        self._heads = (spec.num_heads, kv.format.heads, kv.format.heads)
        self._qkv_shape = (sum(self._heads), kv.format.width)

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Attend: [T, hidden] -> [T, hidden]. Writes the keys and values of all T tokens before any attends."""
        num_tokens = x.shape[0]
        q, k, v = self.qkv(x, ctx).view(num_tokens, *self._qkv_shape).split_with_sizes(self._heads, 1)
        q, k = self.rotary(*self.normalised(q, k), ctx)
        attention = ctx.kv[self.place].attention
        attention.write(k, v, self.layer)
        attended = attention.attend(q, self.layer)
        return self.output(attended.view(num_tokens, self.output.in_features), ctx)

    @property
    def query_width(self) -> int:
        """The width of a token's queries in the attention kernels."""
        return self.spec.num_heads * self.kv.format.width

    def lane_bytes(self, num_tokens: int, longest: int) -> int:
        """Return the bytes between kernels of a step of so many short rows' tokens, by the longest context."""
        return 0

    def attend(self, q: torch.Tensor, out: torch.Tensor, ctx: StepContext) -> None:
        """Fill out [T, in_features of the output] from queries [T, query_width], keys and values being in pages."""
        heads = -1, self.spec.num_heads, self.kv.format.width
        ctx.kv[self.place].attention.attend(q.view(heads), self.layer, out.view(heads))

    def normalised(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise q [T, Hq, D] and k [T, Hkv, D] if there are norms for them."""
        return (q, k) if self.qk_norm is None else (self.qk_norm.q(q), self.qk_norm.k(k))

    def leaves(self) -> tuple[ParameterOwner, ...]:
        norms = () if self.qk_norm is None else (self.qk_norm.q, self.qk_norm.k)
        return (self.qkv, *norms, self.output)


class ProjectionNormAttention(Attention):
    """Attention that normalises queries over all their heads together, and so keys; its norms are of that size."""

    def normalised(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.qk_norm is None:
            return q, k
        return self.qk_norm.q(q.flatten(1)).view(q.shape), self.qk_norm.k(k.flatten(1)).view(k.shape)
