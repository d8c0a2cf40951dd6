"""Makes a decoder of the Llama line from a ModelConfig, under the names that Hugging Face checkpoints give its weights.

Families whose difference config.json and the table FAMILIES of `config/model_dir.py` say (biases, norms of heads, sizes) need nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.core.kv import LayerKV, PageFormat
from photon_grpc.kernels import Kernels
from photon_grpc.layers.attention import Attention, QKNorm
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.head import LMHead
from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.mlp import GatedMLP
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.rotary import RotaryEmbedding
from photon_grpc.layers.unquantized import Unquantized
from photon_grpc.models.decoder import Decoder, DecoderLayer


def build(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    max_model_len: int,
    method: LinearMethod | None = None,
) -> Decoder:
    """The model's decoder for positions below `max_model_len`, its weights not yet allocated (see `models/weights.py`).

    Takes memory for the rotary tables only.
    """
    device = torch.device(device)
    rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, device=device, kernels=kernels)
    return DecoderBuilder(config, dtype, device, kernels, method or Unquantized(), rotary, max_model_len).decoder()


@dataclass(frozen=True, slots=True)
class DecoderBuilder:
    """The sizes, dtype, kernels and tables that all layers of one decoder are made from."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    method: LinearMethod
    rotary: RotaryEmbedding
    max_model_len: int

    def decoder(self) -> Decoder:
        config = self.config
        embedding = Embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size, dtype=self.dtype)
        return Decoder(
            embedding,
            [self.layer(layer) for layer in range(config.num_layers)],
            self.norm("model.norm"),
            self.head(embedding),
            self.kernels,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
        )

    def head(self, embedding: Embedding) -> LMHead:
        tied = self.config.tie_word_embeddings
        return LMHead("lm_head", embedding, tied=tied, method=self.method, draw=self.kernels.draw)

    def layer(self, layer: int) -> DecoderLayer:
        """`layer` counts from 0."""
        prefix = f"model.layers.{layer}."
        return DecoderLayer(
            self.norm(prefix + "input_layernorm"),
            self.attention(layer, prefix + "self_attn."),
            self.norm(prefix + "post_attention_layernorm"),
            self.gated_mlp(prefix + "mlp."),
        )

    def attention(self, layer: int, prefix: str) -> Attention:
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        outputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return Attention(
            layer,
            config.num_heads,
            LayerKV(PageFormat(config.num_kv_heads, config.head_dim, str(self.dtype).removeprefix("torch."))),
            qkv=self.linear(prefix, config.hidden_size, outputs, bias=config.qkv_bias),
            output=self.linear(prefix, q_size, {"o_proj": config.hidden_size}, bias=config.output_bias),
            rotary=self.rotary,
            qk_norm=self.qk_norm(prefix) if config.qk_norm else None,
        )

    def qk_norm(self, prefix: str) -> QKNorm:
        head_dim = self.config.head_dim
        return QKNorm(self.norm(prefix + "q_norm", head_dim), self.norm(prefix + "k_norm", head_dim))

    def gated_mlp(self, prefix: str) -> GatedMLP:
        config = self.config
        size, bias = config.intermediate_size, config.mlp_bias
        gate_up = self.linear(prefix, config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias)
        return GatedMLP(gate_up, self.linear(prefix, size, {"down_proj": config.hidden_size}, bias=bias), self.kernels)

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """Over `size` elements; hidden_size by default."""
        size = size or self.config.hidden_size
        return RMSNorm(name + ".weight", size, self.config.rms_norm_eps, dtype=self.dtype, kernels=self.kernels)

    def linear(self, prefix: str, in_features: int, outputs: dict[str, int], *, bias: bool) -> Linear:
        return Linear(prefix, in_features, outputs, bias=bias, dtype=self.dtype, method=self.method)
