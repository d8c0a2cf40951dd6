"""Gemma 3 (text): norms with 1 + w before and behind attention and feed-forward, GeGLU, a scaled embedding.

Its layers with a window have a rotary embedding of their own; scores are scaled by `query_pre_attn_scalar`. Both come
with the ModelConfig.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch

from photon_grpc.layers.attention import Attention
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.embedding import Embedding, ScaledEmbedding
from photon_grpc.layers.mlp import GatedMLP, GegluMLP
from photon_grpc.layers.norm import OffsetRMSNorm, RMSNorm
from photon_grpc.layers.parameter_owner import ParameterOwner
from photon_grpc.models.decoder import DecoderLayer
from photon_grpc.models.decoder_builder import DecoderBuilder


class SandwichNorms(NamedTuple):
    """The norms of a layer, in the order in which they are computed."""

    input: RMSNorm
    post_attention: RMSNorm
    pre_feedforward: RMSNorm
    post_feedforward: RMSNorm


class SandwichLayer(DecoderLayer):
    """h += norm(attention(norm(h))), then h += norm(feed-forward(norm(h))).

    The residual stream travels beside what is added to it, as in DecoderLayer.
    """

    def __init__(self, norms: SandwichNorms, attention: Attention, mlp: GatedMLP) -> None:
        self.sandwich = norms
        self.attention = attention
        self.mlp = mlp

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        return self.sandwich

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        norms = self.sandwich
        if residual is None:
            x, residual = norms.input(x), x
        else:
            x, residual = norms.input.add(x, residual)
        x = norms.post_attention(self.attention(x, ctx))
        x, residual = norms.pre_feedforward.add(x, residual)
        return norms.post_feedforward(self.mlp(x, ctx)), residual

    def leaves(self) -> Iterator[ParameterOwner]:
        yield self.sandwich.input
        yield from self.attention.leaves()
        yield self.sandwich.post_attention
        yield self.sandwich.pre_feedforward
        yield from self.mlp.leaves()
        yield self.sandwich.post_feedforward


class Gemma3Builder(DecoderBuilder):
    """Builder of SandwichLayers."""

    embedding_class: ClassVar[type[Embedding]] = ScaledEmbedding
    norm_class: ClassVar[type[RMSNorm]] = OffsetRMSNorm
    mlp_class: ClassVar[type[GatedMLP]] = GegluMLP

    def layer(self, layer: int) -> DecoderLayer:
        prefix = self.named(f"model.layers.{layer}.")
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        norms = SandwichNorms(*(self.norm(f"{prefix}{name}_layernorm") for name in names))
        return SandwichLayer(
            norms,
            self.attention(layer, prefix + "self_attn.", norms.input),
            self.gated_mlp(prefix + "mlp.", norms.pre_feedforward),
        )
