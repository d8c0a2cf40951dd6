"""Fused layers: five to eight kernels each.

CHAINS (`chains.py`) lists the forms of a layer that a chain of fused kernels computes. Each of a layer's four products
is multiplied either by a kernel of ours that also does the operations around it (norm and rotary and page write;
residual; norm and SwiGLU), or by the matrix library, which reads the residual stream before its norm and adds to it,
followed by a kernel that applies the norm. The Linear's method chooses per bucket of tokens. A layer whose form has no
chain, or whose weights' format has no such product, is unchanged.

There is one set of weights: steps that do not fit go through the original layer. `fuse` multiplies the weight of every
norm into the projection after it, once and in place, and leaves ones in the norm; where W cannot take it, the fused
products read it beside W.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch

from photon_grpc.core.kv import PageFormat
from photon_grpc.kernels.dtypes import name_of
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.gluon import can_fuse
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE
from photon_grpc.kernels.linear import embed, tiles
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.embedding import Embedding, ScaledEmbedding
from photon_grpc.layers.epilogues import Gemm
from photon_grpc.layers.experts import SparseMLP
from photon_grpc.layers.fused_chain import FusedChain
from photon_grpc.layers.linear import Folded
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parameter_owner import ParameterOwner
from photon_grpc.layers.quantization.embedding import QuantizedEmbedding
from photon_grpc.layers.workspace import Workspace
from photon_grpc.models.chains import CHAINS, Epilogues, products_of
from photon_grpc.models.decoder import Decoder, DecoderLayer

#: Products of qkv, output, gate and up, down; of a layer with experts the first two.
LayerGemms = tuple[Gemm, ...]


class FusedEmbedding(Embedding):
    """An embedding that writes into the buffer of the residual stream, as the first kernel of the chain."""

    def __init__(self, embedding: Embedding, first: FusedDecoderLayer) -> None:
        self.name = embedding.name
        self.weight = embedding.weight
        self.factor = embedding.factor
        self._plain = embedding
        self._first = first

    @property
    def num_parameters(self) -> int:
        return self._plain.num_parameters

    def __call__(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        work = self._first.workspace(token_ids.shape[0], ctx)
        if work is None:
            return self._plain(token_ids, ctx)
        embed.launch(self.weight, token_ids, work.h, work.written(), self.factor)
        return work.h


class FusedDecoderLayer(DecoderLayer):
    """A layer in fused kernels, with its norms folded.

    The residual stream is one tensor, the workspace's, changed in place.

    Args:
        gemms: bucket of tokens -> the products, for every bucket that the chain takes.
    """

    def __init__(self, layer: DecoderLayer, chain: FusedChain, gemms: dict[int, LayerGemms]) -> None:
        self._plain = layer
        self.attention, self.mlp = layer.attention, layer.mlp
        self.chain = chain
        self._gemms = gemms

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        work = self.workspace(x.shape[0], ctx)
        if work is None:
            return self._plain(x, residual, ctx)
        qkv, output, *block = self._gemms[work.bucket]
        work.take(x, residual)
        qkv(work, ctx.kv[self.attention.place].pages, self.attention.layer)
        self.attention.attend(work.q, work.attended, ctx)
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
        return self.chain.workspace(num_tokens, self.attention, ctx)

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        return self._plain.norms

    def leaves(self) -> Iterator[ParameterOwner]:
        return self._plain.leaves()


class FusedSparseLayer(FusedDecoderLayer):
    """A layer with experts, in fused kernels but for theirs; the norm before them is not folded."""

    def feed_forward(self, work: Workspace, gemms: Sequence[Gemm], ctx: StepContext) -> None:
        """Change the residual stream by what follows attention."""
        assert isinstance(self.mlp, SparseMLP)
        work.settle()
        self.mlp.add_to(work, self.norms[1], ctx)


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
    if isinstance(first, FusedDecoderLayer) and type(embedding) in (Embedding, ScaledEmbedding, QuantizedEmbedding):
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
        stages=decoder.stages,
    )


def num_fused(decoder: Decoder) -> int:
    """Return the number of layers that run in fused kernels."""
    return sum(isinstance(layer, FusedDecoderLayer) for layer in decoder.layers)


def _fused(layer: DecoderLayer, chains: dict[Hashable, FusedChain], device: torch.device) -> FusedDecoderLayer | None:
    """Return the layer in fused kernels, its norms folded; None if it has no chain or no products."""
    epilogues = CHAINS.get(layer.form)
    if epilogues is None or not _suits(layer):
        return None
    gemms = _layer_gemms(layer, epilogues(layer))
    attention, linears = layer.attention, products_of(layer)
    # qkv, and gate and up, follow a norm.
    if not gemms or any(linear.method.fold(linear) is Folded.NO for linear in linears[::2]):
        return None
    sizes = tuple((linear.in_features, linear.out_features) for linear in linears)
    key = sizes, attention.kv.format, frozenset(gemms)
    if key not in chains:
        chains[key] = FusedChain(attention, linears, frozenset(gemms), device)
    kind = FusedSparseLayer if isinstance(layer.mlp, SparseMLP) else FusedDecoderLayer
    return kind(layer, chains[key], gemms)


def _suits(layer: DecoderLayer) -> bool:
    """Return whether the kernels support all sizes and constants of this layer.

    Norms of heads have the eps of the norm before them, pages hold keys and values in the layer's dtype, or in 8 bits
    with constants, rows of the residual stream are groups of squares.
    """
    attention, norms, kept = layer.attention, layer.attention.qk_norm, layer.attention.kv.format
    has_one_eps = norms is None or norms.q.eps == norms.k.eps == layer.norms[0].eps
    has_whole_groups = attention.qkv.in_features % squares.GROUP == 0
    dtype = name_of(attention.qkv.dtype if attention.scales is None else PAGE_DTYPE)
    return has_one_eps and has_whole_groups and kept == PageFormat(kept.heads, kept.width, dtype, kept.planes)


def _layer_gemms(layer: DecoderLayer, epilogues: Epilogues) -> dict[int, LayerGemms]:
    """Return the products for the buckets of tokens in which all have one."""
    found: dict[int, LayerGemms] = {}
    for rows in (*tiles.BUCKETS, 0):
        gemms = [linear.gemm(rows, epilogue) for linear, epilogue in zip(products_of(layer), epilogues, strict=True)]
        if all(gemms):
            found[rows] = tuple(gemm for gemm in gemms if gemm)
    return found
