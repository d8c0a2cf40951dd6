"""Qwen3 (dense): every head of q and k is normalised before it is rotated; head_dim is a number of its own."""

from __future__ import annotations

from photon_grpc.layers.attention import Attention
from photon_grpc.models.builder import DecoderBuilder
from photon_grpc.models.decoder import Decoder


def qwen3(parts: DecoderBuilder) -> Decoder:
    def attention(layer: int) -> Attention:
        return parts.attention(layer, qkv_bias=parts.card.qkv_bias, output_bias=parts.card.output_bias, qk_norm=True)

    return parts.decoder(attention, parts.gated_mlp)
