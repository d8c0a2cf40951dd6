"""DeepSeek-V2 (Lite): latent attention, and experts beside some that every token reaches."""

from __future__ import annotations

import torch

from photon_grpc.config.latent import LatentSpec
from photon_grpc.core.kv import LayerKV, PageFormat
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.dtypes import name_of
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.latent import (
    LatentAttention,
    LatentExpansion,
    OrderedLinear,
    QueryLatent,
    QueryLatentAttention,
)
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.group import share_of
from photon_grpc.layers.parallel.latents import OrderedParallelLinear, ParallelExpansion
from photon_grpc.models.sparse import SparseBuilder

#: Of the norms of latents, whatever config.json says about the others.
EPS = 1e-6


class DeepseekBuilder(SparseBuilder):
    """Builder of layers with latent attention."""

    @property
    def sizes(self) -> LatentSpec:
        assert self.config.latent is not None
        return self.config.latent

    def attention(self, layer: int, prefix: str, norm: RMSNorm | None) -> Attention:
        config, sizes = self.config, self.sizes
        num_heads = config.num_heads // self.mesh.tp.size
        spec = AttentionSpec(num_heads, config.attention_scale, self.attention_dtype(prefix), sizes.rank)
        values = config.num_heads * sizes.value
        parts = {
            "qkv": self.projections(prefix, norm),
            "output": self.row_linear(prefix, values, {"o_proj": config.hidden_size}, bias=config.output_bias),
            "rotary": self.rotaries[config.ropes[layer]],
            "norm": self.latent_norm(prefix + "kv_a_layernorm", sizes.rank),
            "expansion": self.expansion(prefix + "kv_b_proj"),
        }
        pages = LayerKV(self.page_format())
        if sizes.query_rank:
            return QueryLatentAttention(spec, pages, sizes, query=self.query_latent(prefix), **parts)
        return LatentAttention(spec, pages, sizes, **parts)

    def page_format(self) -> PageFormat:
        """Return the format of latents. Raise ModelLoadError for pages of 8 bits."""
        if self.saturated is not None:
            raise ModelLoadError("pages of 8 bits cannot hold latents of attention", field="kv_cache_dtype")
        return PageFormat(1, self.sizes.width, name_of(self.dtype), planes=1)

    def projections(self, prefix: str, norm: RMSNorm | None) -> OrderedLinear:
        """Build the projection to queries, or to their latents, and to the latents of keys and values."""
        sizes, heads = self.sizes, self.config.num_heads
        name, rows = ("q_a_proj", sizes.query_rank) if sizes.query_rank else ("q_proj", heads * sizes.head)
        outputs = {name: rows, "kv_a_proj_with_mqa": sizes.width}
        orders = {"kv_a_proj_with_mqa": order_of(1, sizes.rank, sizes.rotated)}
        if not sizes.query_rank:
            orders[name] = order_of(heads // self.mesh.tp.size, sizes.plain, sizes.rotated)
        return self.ordered(prefix, self.config.hidden_size, outputs, orders, norm)

    def query_latent(self, prefix: str) -> QueryLatent:
        sizes, heads = self.sizes, self.config.num_heads
        orders = {"q_b_proj": order_of(heads // self.mesh.tp.size, sizes.plain, sizes.rotated)}
        norm = self.latent_norm(prefix + "q_a_layernorm", sizes.query_rank)
        return QueryLatent(norm, self.ordered(prefix, sizes.query_rank, {"q_b_proj": heads * sizes.head}, orders, None))

    def ordered(
        self, prefix: str, in_features: int, outputs: dict[str, int], orders: dict[str, torch.Tensor],
        norm: RMSNorm | None,
    ) -> OrderedLinear:  # fmt: skip
        """Build a Linear of these orders, which has latents whole. Raise ModelLoadError for packed rows."""
        method = self.method_of(prefix, outputs)
        if not method.reads_floats:
            name = prefix + next(iter(orders))
            raise ModelLoadError(f"{name}: quantized weights of latent attention are not supported", field=name)
        has_bias = self.config.qkv_bias and in_features == self.config.hidden_size
        if has_bias:
            raise ModelLoadError(f"{prefix}kv_a_proj_with_mqa has a bias, which is not supported", field=prefix)
        whole = dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), 1)
        linear = OrderedParallelLinear(
            prefix, in_features, outputs, bias=False, dtype=self.dtype, method=method, norm=norm, group=self.mesh.tp,
            most=whole,
        )  # fmt: skip
        linear.orders = orders
        return linear

    def expansion(self, name: str) -> LatentExpansion:
        """Build the expansion of latents, which stays in 16 bits. Raise ModelLoadError if it is stored quantized."""
        if not self.method(name).reads_floats:
            raise ModelLoadError(f"{name}: quantized weights of latent attention are not supported", field=name)
        share = share_of(self.mesh.tp, self.mesh.tp.size)
        return ParallelExpansion(name + ".weight", self.config.num_heads, self.sizes, self.dtype, share)

    def latent_norm(self, name: str, size: int) -> RMSNorm:
        return self.norm_class(name + ".weight", size, EPS, dtype=self.dtype, kernels=self.kernels)


def order_of(heads: int, plain: int, rotated: int) -> torch.Tensor:
    """Return for each row here its number in the checkpoint: of each head the first numbers of all pairs come first."""
    of_head = torch.cat((torch.arange(plain), plain + torch.arange(rotated).view(-1, 2).t().reshape(-1)))
    return (torch.arange(heads)[:, None] * (plain + rotated) + of_head).flatten()
