"""Fused layers: five to seven kernels each.

CHAINS lists the forms of a layer that a chain of fused kernels computes. Each of a layer's four products is multiplied
either by a kernel of ours that also does the operations around it (norm and rotary and page write; residual; norm and
SwiGLU), or by the matrix library, which reads the residual stream before its norm and adds to it, followed by a kernel
that applies the norm. The Linear's method chooses per bucket of tokens. A layer whose form has no chain, or whose
weights' format has no such product, is unchanged.

There is one set of weights: steps that do not fit go through the original layer. `fuse` multiplies the weight of every
norm into the projection after it, once and in place, and leaves ones in the norm; where W cannot take it, the fused
products read it beside W.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from photon_grpc.core.kv import PageFormat
from photon_grpc.kernels import embed
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.gluon import can_fuse
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE
from photon_grpc.kernels.linear import tiles
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.ends import AddResidual, End, Gemm, Rotary, SwiGLU
from photon_grpc.layers.experts import SparseMLP
from photon_grpc.layers.form import LayerForm
from photon_grpc.layers.fused_chain import FusedChain
from photon_grpc.layers.linear import Folded, Linear
from photon_grpc.layers.mlp import GatedMLP
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.experts import ParallelSparseMLP
from photon_grpc.layers.rotary import RotaryEmbedding
from photon_grpc.layers.workspace import Workspace
from photon_grpc.models.decoder import Decoder, DecoderLayer

#: Products of qkv, output, gate and up, down, and their ends; of a layer with experts the first two.
LayerGemms = tuple[Gemm, ...]
Ends = tuple[End, ...]


def llama_ends(layer: DecoderLayer) -> Ends:
    """Return the epilogues of qkv, output, gate and up, down; heads are normalised if the layer has norms for them."""
    _, _, _, down = products_of(layer)
    return *sparse_ends(layer), SwiGLU(down.in_features, layer.post_attention_norm.eps), AddResidual()


def sparse_ends(layer: DecoderLayer) -> Ends:
    """Return the epilogues of qkv and output."""
    heads, head_dim = layer.attention.qk_norm, layer.attention.kv.format.width
    norms = None if heads is None else (heads.q.weight, heads.k.weight)
    return Rotary(head_dim // 2, layer.input_norm.eps, norms, layer.attention.scales), AddResidual()


def products_of(layer: DecoderLayer) -> tuple[Linear, ...]:
    """Return the Linears of a layer that can be fused, in order; the products of experts are none."""
    linears = layer.attention.qkv, layer.attention.output
    return (*linears, layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, GatedMLP) else linears


LLAMA = LayerForm(
    layer=DecoderLayer,
    norms=(RMSNorm, RMSNorm),
    attention=Attention,
    qk_norms=(),
    rope=RotaryEmbedding,
    ffn=GatedMLP,
)
QWEN3 = LLAMA._replace(qk_norms=(RMSNorm, RMSNorm))
#: Form -> the epilogues of a layer's products. The form must match exactly.
CHAINS: dict[LayerForm, Callable[[DecoderLayer], Ends]] = {
    LLAMA: llama_ends,
    QWEN3: llama_ends,
    **{form._replace(ffn=ffn): sparse_ends for form in (LLAMA, QWEN3) for ffn in (SparseMLP, ParallelSparseMLP)},
}


class FusedEmbedding(Embedding):
    """An embedding that writes into the buffer of the residual stream, as the first kernel of the chain."""

    def __init__(self, embedding: Embedding, first: FusedDecoderLayer) -> None:
        self.name = embedding.name
        self.weight = embedding.weight
        self._first = first

    def __call__(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        work = self._first.workspace(token_ids.shape[0], ctx)
        if work is None:
            return super().__call__(token_ids, ctx)
        embed.launch(self.weight, token_ids, work.h, work.written())
        return work.h


class FusedDecoderLayer(DecoderLayer):
    """A layer in fused kernels, with its norms folded.

    The residual stream is one tensor, the workspace's, changed in place.

    Args:
        gemms: bucket of tokens -> the products, for every bucket that the chain takes.
    """

    def __init__(self, layer: DecoderLayer, chain: FusedChain, gemms: dict[int, LayerGemms]) -> None:
        super().__init__(layer.input_norm, layer.attention, layer.post_attention_norm, layer.mlp)
        self.chain = chain
        self._gemms = gemms
        self._heads = -1, layer.attention.spec.num_heads, layer.attention.kv.format.width

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        work = self.workspace(x.shape[0], ctx)
        if work is None:
            return super().__call__(x, residual, ctx)
        qkv, output, *block = self._gemms[work.bucket]
        work.take(x, residual)
        kv, number = ctx.kv[self.attention.place], self.attention.layer
        qkv(work, kv.pages, number)
        kv.attention.attend(work.q.view(self._heads), number, work.attended.view(self._heads))
        output(work, work.attended)
        self.feed_forward(work, block, ctx)
        return work.h, None

    def feed_forward(self, work: Workspace, gemms: Sequence[Gemm], ctx: StepContext) -> None:
        """Change the residual stream by what follows attention."""
        gate_up, down = gemms
        gate_up(work)
        down(work, work.y)

    def workspace(self, num_tokens: int, ctx: StepContext) -> Workspace | None:
        """Return the step's workspace; None if the layer runs unfused."""
        return self.chain.workspace(num_tokens, self.attention.place, ctx)


class FusedSparseLayer(FusedDecoderLayer):
    """A layer with experts, in fused kernels but for theirs; the norm before them is not folded."""

    def feed_forward(self, work: Workspace, gemms: Sequence[Gemm], ctx: StepContext) -> None:
        """Change the residual stream by what follows attention."""
        assert isinstance(self.mlp, SparseMLP)
        self.mlp.add_to(work, self.post_attention_norm(work.h), ctx)


def fuse(decoder: Decoder) -> Decoder | None:
    """Return the loaded decoder with fused layers; None if its dtype, device or layers forbid them.

    The norms' weights are folded in place: both decoders compute the same from then on.
    """
    if not can_fuse(decoder.device) or decoder.dtype not in (torch.bfloat16, torch.float16):
        return None
    return with_chains(decoder)


@torch.no_grad()
def with_chains(decoder: Decoder) -> Decoder | None:
    """Return the loaded decoder with a FusedDecoderLayer for every layer that has a chain; None where none has."""
    chains: dict[Hashable, FusedChain] = {}
    layers = [_fused(layer, chains, decoder.device) or layer for layer in decoder.layers]
    if not chains:
        return None
    embedding, first = decoder.embedding, layers[0]
    if isinstance(first, FusedDecoderLayer) and type(embedding) is Embedding:
        embedding = FusedEmbedding(embedding, first)
    return Decoder(
        embedding,
        layers,
        decoder.norm,
        decoder.head.fused(),
        decoder.kernels,
        dtype=decoder.dtype,
        device=decoder.device,
        max_model_len=decoder.max_model_len,
    )


def num_fused(decoder: Decoder) -> int:
    """Return the number of layers that run in fused kernels."""
    return sum(isinstance(layer, FusedDecoderLayer) for layer in decoder.layers)


def _fused(layer: DecoderLayer, chains: dict[Hashable, FusedChain], device: torch.device) -> FusedDecoderLayer | None:
    """Return the layer in fused kernels, its norms folded; None if it has no chain or no products."""
    ends = CHAINS.get(layer.form)
    if ends is None or not _suits(layer):
        return None
    gemms = _layer_gemms(layer, ends(layer))
    attention, linears = layer.attention, products_of(layer)
    # qkv, and gate and up, follow a norm.
    if not gemms or any(linear.method.fold(linear) is Folded.NO for linear in linears[::2]):
        return None
    sizes = tuple((linear.in_features, linear.out_features) for linear in linears)
    key = sizes, attention.kv.format, attention.rotary, frozenset(gemms)
    if key not in chains:
        chains[key] = FusedChain(attention, linears, frozenset(gemms), device)
    kind = FusedSparseLayer if isinstance(layer.mlp, SparseMLP) else FusedDecoderLayer
    return kind(layer, chains[key], gemms)


def _suits(layer: DecoderLayer) -> bool:
    """Return whether the kernels take every number that this layer computes with.

    Heads are rotated whole, their norms have the eps of the norm before them, pages hold keys and values in the layer's
    dtype, or in 8 bits with constants, rows of the residual stream are groups of squares.
    """
    attention, norms, kept = layer.attention, layer.attention.qk_norm, layer.attention.kv.format
    has_one_eps = norms is None or norms.q.eps == norms.k.eps == layer.input_norm.eps
    has_whole_heads = 2 * attention.rotary.cos.shape[1] == kept.width
    has_whole_groups = attention.qkv.in_features % squares.GROUP == 0
    dtype = str(attention.qkv.dtype if attention.scales is None else PAGE_DTYPE).removeprefix("torch.")
    return has_one_eps and has_whole_heads and has_whole_groups and kept == PageFormat(kept.heads, kept.width, dtype)


def _layer_gemms(layer: DecoderLayer, ends: Ends) -> dict[int, LayerGemms]:
    """Return the products for the buckets of tokens in which all have one."""
    found: dict[int, LayerGemms] = {}
    for rows in (*tiles.BUCKETS, 0):
        gemms = [linear.gemm(rows, end) for linear, end in zip(products_of(layer), ends, strict=True)]
        if all(gemms):
            found[rows] = tuple(gemm for gemm in gemms if gemm)
    return found
