"""Qwen2 and Qwen2.5: Llama with a bias on the q, k and v projections, and none on the output's."""

from __future__ import annotations

from photon_grpc.layers.attention import Attention
from photon_grpc.models.builder import DecoderBuilder
from photon_grpc.models.decoder import Decoder


def qwen2(parts: DecoderBuilder) -> Decoder:
    def attention(layer: int) -> Attention:
        return parts.attention(layer, qkv_bias=True, output_bias=False)

    return parts.decoder(attention, parts.gated_mlp)
