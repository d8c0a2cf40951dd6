"""Makes a decoder's parts under the names that Hugging Face checkpoints of the Llama line give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.core.kv import KVSpec
from photon_grpc.kernels import Kernels
from photon_grpc.layers.attention import Attention, QKNorm
from photon_grpc.layers.embedding import Embedding, LMHead
from photon_grpc.layers.linear import Linear, QuantMethod
from photon_grpc.layers.mlp import GatedMLP
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.rotary import RotaryEmbedding
from photon_grpc.models.decoder import Decoder, DecoderLayer


@dataclass(frozen=True, slots=True)
class DecoderBuilder:
    """What every part of one decoder is made from."""

    card: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    method: QuantMethod
    rotary: RotaryEmbedding
    max_model_len: int

    def decoder(self, attention: Callable[[int], Attention], mlp: Callable[[int], GatedMLP]) -> Decoder:
        """All layers alike; `attention` and `mlp` are given the layer's number."""
        card = self.card
        embedding = Embedding("model.embed_tokens.weight", card.vocab_size, card.hidden_size, dtype=self.dtype)
        layers = [
            DecoderLayer(
                self.norm(f"model.layers.{layer}.input_layernorm"),
                attention(layer),
                self.norm(f"model.layers.{layer}.post_attention_layernorm"),
                mlp(layer),
            )
            for layer in range(card.num_layers)
        ]
        head = LMHead("lm_head.weight", embedding, tied=card.tie_word_embeddings)
        return Decoder(
            embedding,
            layers,
            self.norm("model.norm"),
            head,
            self.kernels.draw,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
        )

    def attention(self, layer: int, *, qkv_bias: bool, output_bias: bool, qk_norm: bool = False) -> Attention:
        card, prefix = self.card, f"model.layers.{layer}.self_attn."
        q_size, kv_size = card.num_heads * card.head_dim, card.num_kv_heads * card.head_dim
        norms = (
            QKNorm(self.norm(prefix + "q_norm", card.head_dim), self.norm(prefix + "k_norm", card.head_dim))
            if qk_norm
            else None
        )
        return Attention(
            layer,
            card.num_heads,
            KVSpec(card.num_kv_heads, card.head_dim),
            qkv=self.linear(
                prefix, card.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, bias=qkv_bias
            ),
            output=self.linear(prefix, q_size, {"o_proj": card.hidden_size}, bias=output_bias),
            rotary=self.rotary,
            kernels=self.kernels,
            qk_norm=norms,
        )

    def gated_mlp(self, layer: int) -> GatedMLP:
        card, prefix = self.card, f"model.layers.{layer}.mlp."
        size = card.intermediate_size
        gate_up = self.linear(prefix, card.hidden_size, {"gate_proj": size, "up_proj": size}, bias=card.mlp_bias)
        return GatedMLP(
            gate_up, self.linear(prefix, size, {"down_proj": card.hidden_size}, bias=card.mlp_bias), self.kernels
        )

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """Over `size` elements, hidden_size where not said."""
        return RMSNorm(
            name + ".weight",
            size or self.card.hidden_size,
            self.card.rms_norm_eps,
            dtype=self.dtype,
            kernels=self.kernels,
        )

    def linear(self, prefix: str, in_features: int, outputs: dict[str, int], *, bias: bool) -> Linear:
        return Linear(prefix, in_features, outputs, bias=bias, dtype=self.dtype, method=self.method)
