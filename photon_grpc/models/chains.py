"""The forms of layers that fused kernels compute, and the epilogues of a layer's products in each.

All run the same kernels in the same order (`fused.py`): another form changes only their epilogues.
"""

from __future__ import annotations

from collections.abc import Callable

from photon_grpc.kernels.norm_add import Norm
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.epilogues import AddNormed, AddResidual, Epilogue, GeGLU, Latents, Rotary, SwiGLU
from photon_grpc.layers.experts import SparseMLP
from photon_grpc.layers.form import LayerForm
from photon_grpc.layers.latent import LatentAttention
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.mlp import GatedMLP, GegluMLP
from photon_grpc.layers.norm import OffsetRMSNorm, RMSNorm
from photon_grpc.layers.parallel.experts import ParallelSparseMLP
from photon_grpc.layers.rotary import PartialRotaryEmbedding, RotaryEmbedding
from photon_grpc.models.decoder import DecoderLayer
from photon_grpc.models.gemma3 import SandwichLayer

#: Of qkv, output, gate and up, down; of a layer with experts the first two.
Epilogues = tuple[Epilogue, ...]


def products_of(layer: DecoderLayer) -> tuple[Linear, ...]:
    """Return the Linears of a layer that can be fused, in order; the products of experts are none."""
    linears = layer.attention.qkv, layer.attention.output
    return (*linears, layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, GatedMLP) else linears


def first_epilogue(layer: DecoderLayer) -> Rotary | Latents:
    """Return the epilogue of qkv; heads are normalised if the layer has norms for them."""
    if isinstance(layer.attention, LatentAttention):
        return latent_epilogue(layer.attention, layer.norms[0].eps)
    heads, head_dim = layer.attention.qk_norm, layer.attention.kv.format.width
    norms = None if heads is None else (heads.q.weight, heads.k.weight)
    is_whole = 2 * layer.attention.rotary.cos.shape[1] == head_dim
    return Rotary(head_dim // 2, layer.norms[0].eps, norms, layer.attention.scales, is_whole)


def latent_epilogue(attention: LatentAttention, eps: float) -> Latents:
    """Return the epilogue of the first projection of latent attention; `eps` is that of the norm before."""
    norm = attention.norm
    return Latents(eps, (norm.weight, norm.eps), attention.expansion.weight, attention.sizes.plain)


def llama_epilogues(layer: DecoderLayer) -> Epilogues:
    """Return the epilogues of a layer with norms before attention and feed-forward."""
    _, _, _, down = products_of(layer)
    return *sparse_epilogues(layer), SwiGLU(down.in_features, layer.norms[1].eps), AddResidual()


def sparse_epilogues(layer: DecoderLayer) -> Epilogues:
    """Return the epilogues of qkv and output of a layer with experts."""
    return first_epilogue(layer), AddResidual()


def sandwich_epilogues(layer: DecoderLayer) -> Epilogues:
    """Return the epilogues of a layer with norms before and behind attention and feed-forward."""
    _, post_attention, pre_feedforward, post_feedforward = layer.norms
    _, _, _, down = products_of(layer)
    gate_up = GeGLU(down.in_features, pre_feedforward.eps)
    behind = (AddNormed(Norm(norm.weight, norm.eps)) for norm in (post_attention, post_feedforward))
    return first_epilogue(layer), next(behind), gate_up, next(behind)


LLAMA = LayerForm(
    layer=DecoderLayer,
    norms=(RMSNorm, RMSNorm),
    attention=Attention,
    qk_norms=(),
    rope=RotaryEmbedding,
    ffn=GatedMLP,
)
QWEN3 = LLAMA._replace(qk_norms=(RMSNorm, RMSNorm))
PHI4_MINI = LLAMA._replace(rope=PartialRotaryEmbedding)
GEMMA3 = LayerForm(
    layer=SandwichLayer,
    norms=(OffsetRMSNorm,) * 4,
    attention=Attention,
    qk_norms=(OffsetRMSNorm, OffsetRMSNorm),
    rope=RotaryEmbedding,
    ffn=GegluMLP,
)
DEEPSEEK = LLAMA._replace(attention=LatentAttention)
#: Form -> the epilogues of a layer's products. The form must match exactly.
CHAINS: dict[LayerForm, Callable[[DecoderLayer], Epilogues]] = {
    LLAMA: llama_epilogues,
    QWEN3: llama_epilogues,
    PHI4_MINI: llama_epilogues,
    GEMMA3: sandwich_epilogues,
    DEEPSEEK: llama_epilogues,
    **{
        form._replace(ffn=ffn): sparse_epilogues
        for form in (LLAMA, QWEN3, DEEPSEEK)
        for ffn in (SparseMLP, ParallelSparseMLP)
    },
}
