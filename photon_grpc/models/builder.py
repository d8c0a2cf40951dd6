"""Builder of a decoder of the Llama line from a ModelConfig, with the weight names of Hugging Face checkpoints.

A family that differs only in config.json or in FAMILIES of `config/model_dir.py` (biases, norms of heads, sizes)
needs nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.core.kv import LayerKV, PageFormat
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import Kernels
from photon_grpc.layers.attention import Attention, QKNorm
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.head import LMHead
from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.mlp import GatedMLP
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel import ColumnParallelLinear, Mesh, RowParallelLinear
from photon_grpc.layers.quantization.methods import Method, methods
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
    method: Method | None = None,
    mesh: Mesh | None = None,
) -> Decoder:
    """Return the model's decoder for positions below `max_model_len`, its weights not yet allocated.

    It takes memory for the rotary tables only. `method` is Unquantized for all by default. With a `mesh` it is this
    rank's part. Raise ModelLoadError if a size cannot be split over the ranks, or does not suit its method.
    """
    mesh = mesh or Mesh()
    _check_shares(config, mesh)
    device = torch.device(device)
    rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, device=device, kernels=kernels)
    method = method or methods(None)
    return DecoderBuilder(config, dtype, device, kernels, method, rotary, max_model_len, mesh).decoder()


@dataclass(frozen=True, slots=True)
class DecoderBuilder:
    """Builder of every part of one decoder from the same sizes, dtype, kernels and tables."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    method: Method
    rotary: RotaryEmbedding
    max_model_len: int
    mesh: Mesh

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
        method = Unquantized() if tied else self.method("lm_head")
        return LMHead("lm_head", embedding, tied=tied, method=method, sample=self.kernels.sample)

    def layer(self, layer: int) -> DecoderLayer:
        """Build layer number `layer`, counted from 0."""
        prefix = f"model.layers.{layer}."
        norms = self.norm(prefix + "input_layernorm"), self.norm(prefix + "post_attention_layernorm")
        return DecoderLayer(
            norms[0],
            self.attention(layer, prefix + "self_attn.", norms[0]),
            norms[1],
            self.gated_mlp(prefix + "mlp.", norms[1]),
        )

    def attention(self, layer: int, prefix: str, norm: RMSNorm) -> Attention:
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        outputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return Attention(
            config.num_heads // self.mesh.tp.size,
            LayerKV(self.page_format(), self.window(layer)),
            qkv=self.column_linear(prefix, config.hidden_size, outputs, bias=config.qkv_bias, norm=norm),
            output=self.row_linear(prefix, q_size, {"o_proj": config.hidden_size}, bias=config.output_bias),
            rotary=self.rotary,
            qk_norm=self.qk_norm(prefix) if config.qk_norm else None,
        )

    def window(self, layer: int) -> int:
        """Return the layer's window; 0 if it hides nothing from positions below `max_model_len`."""
        window = self.config.windows[layer]
        return window if window < self.max_model_len else 0

    def page_format(self) -> PageFormat:
        num_kv_heads, dtype = self.config.num_kv_heads // self.mesh.tp.size, str(self.dtype).removeprefix("torch.")
        return PageFormat(num_kv_heads, self.config.head_dim, dtype)

    def qk_norm(self, prefix: str) -> QKNorm:
        head_dim = self.config.head_dim
        return QKNorm(self.norm(prefix + "q_norm", head_dim), self.norm(prefix + "k_norm", head_dim))

    def gated_mlp(self, prefix: str, norm: RMSNorm) -> GatedMLP:
        config = self.config
        size, bias = config.intermediate_size, config.mlp_bias
        outputs = {"gate_proj": size, "up_proj": size}
        gate_up = self.column_linear(prefix, config.hidden_size, outputs, bias=bias, norm=norm)
        down = self.row_linear(prefix, size, {"down_proj": config.hidden_size}, bias=bias)
        return GatedMLP(gate_up, down, self.kernels)

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """Build a norm over `size` elements, hidden_size by default."""
        size = size or self.config.hidden_size
        return RMSNorm(name + ".weight", size, self.config.rms_norm_eps, dtype=self.dtype, kernels=self.kernels)

    def column_linear(
        self, prefix: str, in_features: int, outputs: dict[str, int], *, bias: bool, norm: RMSNorm
    ) -> Linear:
        """Build a column-parallel Linear; sizes are those of the whole model."""
        shared = {"dtype": self.dtype, "method": self.method_of(prefix, outputs), "group": self.mesh.tp}
        return ColumnParallelLinear(prefix, in_features, outputs, bias=bias, norm=norm, **shared)

    def row_linear(self, prefix: str, in_features: int, outputs: dict[str, int], *, bias: bool) -> Linear:
        """Build a row-parallel Linear; sizes are those of the whole model."""
        shared = {"dtype": self.dtype, "method": self.method_of(prefix, outputs), "group": self.mesh.tp}
        return RowParallelLinear(prefix, in_features, outputs, bias=bias, **shared)

    def method_of(self, prefix: str, outputs: dict[str, int]) -> LinearMethod:
        """Return the method of a Linear. Raise ModelLoadError if its outputs, stored as one W, have several."""
        found = {name: self.method(prefix + name) for name in outputs}
        first, *others = dict.fromkeys(found.values())
        if others:
            odd = next(name for name, method in found.items() if method is not first)
            raise ModelLoadError(
                f"{prefix}{next(iter(found))} and {prefix}{odd} are multiplied as one weight, but only one of them is "
                "quantized: ignore all of them or none",
                field=prefix + odd,
            )
        return first


def _check_shares(config: ModelConfig, mesh: Mesh) -> None:
    for field in ("num_kv_heads", "num_heads", "intermediate_size"):
        size = getattr(config, field)
        if size % mesh.tp.size:
            raise ModelLoadError(f"{field} {size} cannot be shared out over {mesh.tp.size} ranks", field=field)
