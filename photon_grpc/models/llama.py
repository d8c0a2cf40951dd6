"""Llama 2 and 3: `attention_bias` adds a bias to all four projections of attention, `mlp_bias` to the feed-forward's."""

from __future__ import annotations

from photon_grpc.layers.attention import Attention
from photon_grpc.models.builder import DecoderBuilder
from photon_grpc.models.decoder import Decoder


def llama(parts: DecoderBuilder) -> Decoder:
    def attention(layer: int) -> Attention:
        return parts.attention(layer, qkv_bias=parts.card.qkv_bias, output_bias=parts.card.output_bias)

    return parts.decoder(attention, parts.gated_mlp)
