"""OLMo-2: norms behind attention and feed-forward, none before them; queries and keys normalised over all heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from photon_grpc.layers.attention import Attention, ProjectionNormAttention, QKNorm
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.mlp import GatedMLP
from photon_grpc.layers.norm import OnceRoundedRMSNorm, RMSNorm
from photon_grpc.layers.parallel.group import share_of
from photon_grpc.layers.parallel.norms import GatheredRMSNorm
from photon_grpc.layers.parameter_owner import ParameterOwner
from photon_grpc.models.decoder import DecoderLayer
from photon_grpc.models.decoder_builder import DecoderBuilder


class PostNormLayer(DecoderLayer):
    """h += norm(attention(h)), then h += norm(feed-forward(h)). The residual stream is one tensor."""

    def __init__(
        self, attention: Attention, post_attention_norm: RMSNorm, mlp: GatedMLP, post_feedforward_norm: RMSNorm
    ) -> None:
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp
        self.post_feedforward_norm = post_feedforward_norm

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        return self.post_attention_norm, self.post_feedforward_norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        h = x if residual is None else x + residual
        h = h + self.post_attention_norm(self.attention(h, ctx))
        return h + self.post_feedforward_norm(self.mlp(h, ctx)), None

    def leaves(self) -> Iterator[ParameterOwner]:
        yield from self.attention.leaves()
        yield self.post_attention_norm
        yield from self.mlp.leaves()
        yield self.post_feedforward_norm


class Olmo2Builder(DecoderBuilder):
    """Builder of PostNormLayers."""

    norm_class: ClassVar[type[RMSNorm]] = OnceRoundedRMSNorm
    attention_class: ClassVar[type[Attention]] = ProjectionNormAttention

    def layer(self, layer: int) -> DecoderLayer:
        prefix = self.named(f"model.layers.{layer}.")
        return PostNormLayer(
            self.attention(layer, prefix + "self_attn.", None),
            self.norm(prefix + "post_attention_layernorm"),
            self.gated_mlp(prefix + "mlp.", None),
            self.norm(prefix + "post_feedforward_layernorm"),
        )

    def qk_norm(self, prefix: str) -> QKNorm:
        return QKNorm(*(self.heads_norm(prefix + name, heads) for name, heads in
                        (("q_norm", self.config.num_heads), ("k_norm", self.config.num_kv_heads))))  # fmt: skip

    def heads_norm(self, name: str, num_heads: int) -> RMSNorm:
        """Build the norm over all heads of queries, or of keys."""
        group, size = self.mesh.tp, num_heads * self.config.head_dim
        if group.size == 1:
            return self.norm(name, size)
        shared: dict[str, Any] = {"dtype": self.dtype, "kernels": self.kernels}
        share = share_of(group, num_heads)
        return GatheredRMSNorm(name + ".weight", size, self.config.rms_norm_eps, group=group, share=share, **shared)
