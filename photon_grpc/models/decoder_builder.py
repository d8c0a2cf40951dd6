"""Builder of a decoder from a ModelConfig, with the weight names of Hugging Face checkpoints: the Llama line.

A family that differs only in config.json or in FAMILIES of `config/families.py` (biases, norms of heads, sizes,
windows, rotary embedding) needs nothing more. One with other parts, other names or another order has a subclass in a
file of its own, which `models/builder.py` lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.config.rope import RopeSpec
from photon_grpc.core.kv import LayerKV, PageFormat
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.dtypes import name_of
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE, PageScales
from photon_grpc.layers.attention import Attention, QKNorm
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.head import LMHead
from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.mlp import GatedMLP
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.group import Group, Mesh, can_share, share_of
from photon_grpc.layers.parallel.linears import ColumnParallelLinear, RowParallelLinear
from photon_grpc.layers.parallel.stages import Stages
from photon_grpc.layers.parallel.vocabulary import VocabularyParallelHead, can_share_vocabulary
from photon_grpc.layers.quantization.embedding import EmbeddingRows, QuantizedEmbedding
from photon_grpc.layers.quantization.methods import Method
from photon_grpc.layers.rotary import RotaryEmbedding
from photon_grpc.layers.unquantized import Unquantized
from photon_grpc.models.decoder import Decoder, DecoderLayer, FeedForward


@dataclass(frozen=True, slots=True)
class DecoderBuilder:
    """Builds every part of one decoder from the same sizes, dtype, kernels and tables."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    method: Method
    #: One for each of the config's `ropes`.
    rotaries: Mapping[RopeSpec | None, RotaryEmbedding]
    max_model_len: int
    mesh: Mesh
    #: Counts numbers beyond the range of pages of 8 bits; None: pages have the decoder's dtype.
    saturated: torch.Tensor | None = None
    #: What names of tensors that other ranks have begin with.
    elsewhere: set[str] = field(default_factory=set)

    #: The classes of the parts that a family may replace.
    embedding_class: ClassVar[type[Embedding]] = Embedding
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    attention_class: ClassVar[type[Attention]] = Attention
    mlp_class: ClassVar[type[GatedMLP]] = GatedMLP

    def check_shares(self) -> None:
        """Raise ModelLoadError if the model cannot be split over the ranks of the mesh."""
        group, config, size = self.mesh.tp, self.config, self.mesh.tp.size
        self.refuse_share("num_kv_heads", config.num_kv_heads, size, fits=can_share(group, config.num_kv_heads))
        self.refuse_share("num_heads", config.num_heads, size)
        self.refuse_share("intermediate_size", config.intermediate_size, size)
        world = self.mesh.world.size
        self.refuse_share("vocab_size", config.vocab_size, world, fits=can_share_vocabulary(config.vocab_size, world))
        self.check_stages()
        if config.experts is None and self.mesh.experts.count > 1:
            raise ModelLoadError("--expert-parallel-size: this model has no experts", field="expert_parallel_size")

    def refuse_share(self, name: str, size: int, num_ranks: int, *, fits: bool | None = None) -> None:
        """Raise ModelLoadError unless a size of the model can be split over the ranks, by default as a multiple."""
        if not (size % num_ranks == 0 if fits is None else fits):
            flag = "--expert-parallel-size" if self.mesh.experts.count > 1 else "--tensor-parallel-size"
            raise ModelLoadError(
                f"{name} {size} cannot be shared out over {num_ranks} ranks ({flag})",
                field=name,
                needed=num_ranks,
                limit=size,
            )

    def check_stages(self) -> None:
        """Raise ModelLoadError unless every stage has a layer, and all have block tables for the same windows."""
        size, num_layers = self.mesh.pp.size, self.config.num_layers
        if num_layers < size:
            raise ModelLoadError(
                f"num_hidden_layers {num_layers} cannot be shared out over {size} stages (--pipeline-parallel-size)",
                field="num_hidden_layers",
                needed=size,
                limit=num_layers,
            )
        if size > 1 and len({self.window(layer) for layer in range(num_layers)}) > 1:
            raise ModelLoadError(
                "--pipeline-parallel-size: layers with different sliding windows cannot be shared out over stages",
                field="pipeline_parallel_size",
            )

    def decoder(self) -> Decoder:
        config, embedding, stages = self.config, self.embedding(), Stages(self.mesh.pp)
        own = stages.layers(config.num_layers)
        decoder = Decoder(
            embedding,
            [self.layer(layer) for layer in own],
            self.norm(self.named("model.norm")),
            self.head(embedding),
            self.kernels,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            stages=stages,
        )
        others = (self.named(f"model.layers.{layer}.") for layer in range(config.num_layers) if layer not in own)
        decoder.first_layer, decoder.elsewhere = own.start, frozenset(self.elsewhere | {*others})
        return decoder

    def named(self, name: str) -> str:
        """Return the name in the checkpoint for a `name`, or a prefix, of the text-only model."""
        return self.config.tensor_prefix + name

    def embedding(self) -> Embedding:
        config = self.config
        name = self.named("model.embed_tokens")
        plain = self.embedding_class(name + ".weight", config.vocab_size, config.hidden_size, dtype=self.dtype)
        method = self.method(name)
        return QuantizedEmbedding(plain, method) if isinstance(method, EmbeddingRows) else plain

    def head(self, embedding: Embedding) -> LMHead:
        tied = self.config.tie_word_embeddings
        name = self.named("lm_head")
        method = self.method(name)
        if tied and not method.reads_floats:
            method = Unquantized()
        parts = {"tied": tied, "method": method, "sample": self.kernels.sample}
        if self.mesh.world.size == 1:
            return LMHead(name, embedding, **parts)
        return VocabularyParallelHead(name, embedding, group=self.mesh.world, **parts)

    def layer(self, layer: int) -> DecoderLayer:
        """Build layer number `layer`, counted from 0."""
        prefix = self.named(f"model.layers.{layer}.")
        norms = self.norm(prefix + "input_layernorm"), self.norm(prefix + "post_attention_layernorm")
        return DecoderLayer(
            norms[0],
            self.attention(layer, prefix + "self_attn.", norms[0]),
            norms[1],
            self.feed_forward(layer, prefix, norms[1]),
        )

    def feed_forward(self, layer: int, prefix: str, norm: RMSNorm | None) -> FeedForward:
        """Build what follows attention in a layer; `prefix` is the layer's."""
        return self.gated_mlp(prefix + "mlp.", norm)

    def attention(self, layer: int, prefix: str, norm: RMSNorm | None) -> Attention:
        config, outputs = self.config, self.qkv_outputs()
        most = dict.fromkeys(("k_proj", "v_proj"), config.num_kv_heads)
        q_size = config.num_heads * config.head_dim
        attention = self.attention_class(
            AttentionSpec(config.num_heads // self.mesh.tp.size, config.attention_scale, self.attention_dtype(prefix)),
            LayerKV(self.page_format(), self.window(layer)),
            qkv=self.column_linear(
                prefix, self.attention_features(), outputs, bias=config.qkv_bias, norm=norm, most=most
            ),
            output=self.row_linear(prefix, q_size, {"o_proj": config.hidden_size}, bias=config.output_bias),
            rotary=self.rotaries[config.ropes[layer]],
            qk_norm=self.qk_norm(prefix) if config.qk_norm else None,
        )
        attention.scales = self.page_scales()
        attention.kv_heads = self.kv_heads
        return attention

    def attention_dtype(self, prefix: str) -> torch.dtype:
        """Return the type in which attention is computed.

        On a CPU the last bits of float32 sums depend on the rows that are computed together (`eight_bits.py`).
        """
        rounds_inputs = self.device.type == "cpu" and self.method(prefix + "o_proj").rounds_inputs
        return torch.float64 if rounds_inputs else self.dtype

    def attention_features(self) -> int:
        """Return the size of an input of attention."""
        return self.config.hidden_size

    def qkv_outputs(self) -> dict[str, int]:
        """Return the names and sizes of the projections of queries, keys and values, in this order."""
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}

    def window(self, layer: int) -> int:
        """Return the layer's window; 0 if it hides nothing from positions below `max_model_len`."""
        window = self.config.windows[layer]
        return window if window < self.max_model_len else 0

    @property
    def kv_heads(self) -> slice:
        """The key-value heads of this rank among those of the model."""
        return share_of(self.mesh.tp, self.config.num_kv_heads).of(self.config.num_kv_heads)

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads.stop - self.kv_heads.start

    def page_format(self) -> PageFormat:
        dtype = self.dtype if self.saturated is None else PAGE_DTYPE
        return PageFormat(self.num_kv_heads, self.config.head_dim, name_of(dtype))

    def page_scales(self) -> PageScales | None:
        if self.saturated is None:
            return None
        return PageScales.ones(self.num_kv_heads, self.saturated, self.config.head_dim)

    def qk_norm(self, prefix: str) -> QKNorm:
        head_dim = self.config.head_dim
        return QKNorm(self.norm(prefix + "q_norm", head_dim), self.norm(prefix + "k_norm", head_dim))

    def gated_mlp(self, prefix: str, norm: RMSNorm | None) -> GatedMLP:
        config = self.config
        size, bias = config.intermediate_size, config.mlp_bias
        gate_up = self.column_linear(prefix, config.hidden_size, self.gate_up_outputs(), bias=bias, norm=norm)
        down = self.row_linear(prefix, size, {"down_proj": config.hidden_size}, bias=bias)
        return self.mlp_class(gate_up, down, self.kernels)

    def gate_up_outputs(self) -> dict[str, int]:
        """Return the names and sizes of the projections of gate and up, in this order."""
        return {"gate_proj": self.config.intermediate_size, "up_proj": self.config.intermediate_size}

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """Build a norm over `size` elements, hidden_size by default."""
        size = size or self.config.hidden_size
        eps, shared = self.config.rms_norm_eps, {"dtype": self.dtype, "kernels": self.kernels}
        return self.norm_class(name + ".weight", size, eps, **shared)

    def column_linear(
        self, prefix: str, in_features: int, outputs: dict[str, int], *, bias: bool, norm: RMSNorm | None,
        most: dict[str, int] | None = None, group: Group | None = None,
    ) -> Linear:  # fmt: skip
        """Build a column-parallel Linear; sizes are those of the whole model, `most` as there."""
        shared = {"dtype": self.dtype, "method": self.method_of(prefix, outputs), "group": group or self.mesh.tp}
        return ColumnParallelLinear(prefix, in_features, outputs, bias=bias, norm=norm, most=most, **shared)

    def row_linear(self, prefix: str, in_features: int, outputs: dict[str, int], *, bias: bool) -> Linear:
        """Build a row-parallel Linear; sizes are those of the whole model."""
        shared = {"dtype": self.dtype, "method": self.method_of(prefix, outputs), "group": self.mesh.tp}
        # Of a layer's two sums over ranks, attention's is the first.
        site = int("o_proj" not in outputs)
        return RowParallelLinear(prefix, in_features, outputs, bias=bias, site=site, **shared)

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
