"""A finished decoder in fewer kernels: five to seven a layer.

Each of a layer's four projections is multiplied either by a kernel of ours that does what stands before and behind it as well (norm and rotary
and page write; residual; norm and SwiGLU), or by the matrix library: of the residual stream as it is and into it, with a kernel behind that
catches up on the norm. Which one is a choice per bucket of tokens, from `kernels/linear/tiles.py`; the library's are all of more than 128. The
head draws without writing its logits, where that wins.

There is one set of weights. `fuse` multiplies the weight of every norm into the projection behind it, once and in place, and
leaves ones in the norm: what does not fit goes on through the decoder as it was.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels import DependentChain, embed, swiglu
from photon_grpc.kernels.attention import gluon_decode
from photon_grpc.kernels.attention.dispatch import MAX_DECODE_ROWS
from photon_grpc.kernels.gluon import can_fuse
from photon_grpc.kernels.linear import head, tiles
from photon_grpc.kernels.linear.fused_linear import add_launch, qkv_launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotation import Rotation
from photon_grpc.kernels.sampling.draw import SamplingMetadata
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.linear import Linear, Unquantized
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.models.decoder import Decoder, DecoderLayer


class LayerTiles(NamedTuple):
    """How the four projections of a layer are multiplied, for one bucket of tokens; None: by the matrix library."""

    qkv: Tile | None = None
    output: Tile | None = None
    gate_up: Tile | None = None
    down: Tile | None = None


BY_LIBRARY = LayerTiles()


class FusedDecoder(Decoder):
    """The decoder it was made from, with a faster `forward`, `logits` and `draw`.

    Args:
        decoder: loaded, its norms folded; its parts are shared.
        layer_tiles: bucket of tokens -> tiles of the layers.
        head_tiles: bucket of rows -> tile of the head; the library's for others.
    """

    def __init__(self, decoder: Decoder, layer_tiles: dict[int, LayerTiles], head_tiles: dict[int, Tile]) -> None:
        super().__init__(
            decoder.embedding,
            decoder.layers,
            decoder.norm,
            decoder.head,
            decoder.kernels,
            dtype=decoder.dtype,
            device=decoder.device,
            max_model_len=decoder.max_model_len,
        )
        self._tiles = layer_tiles
        self._head_tiles = head_tiles
        self._rotary = decoder.layers[0].attention.rotary
        # The residual stream's products before it is normalised may be large: float16 ends at 65,504.
        self._may_multiply_raw = decoder.dtype != torch.float16
        # Zero before and after every kernel that counts its programs; each kernel of a step waits for the one before.
        self._counters = torch.zeros(self._num_counters(), dtype=torch.int32, device=decoder.device)

    def forward(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """As Decoder.forward. Allocates by the step's shape alone and can be captured."""
        num_tokens = token_ids.shape[0]
        chosen = self._chosen(num_tokens)
        if chosen is None:
            return super().forward(token_ids, ctx)
        rows = tiles.bucket(num_tokens)
        h, q, attended, y = self._buffers(num_tokens, rows or num_tokens)
        rotation = Rotation(self._rotary.cos, self._rotary.sin, ctx.positions, ctx.kv[0].slot_mapping.long())
        embed.launch(self.embedding.weight, token_ids, h)
        for layer in self.layers:
            self._project_qkv(layer, h, q, ctx, rotation, chosen.qkv)
            self._attend(layer.attention, q, ctx, attended)
            self._add(h, attended, layer.attention.output, chosen.output)
            self._gate_up(layer, h, y, chosen.gate_up)
            self._add(h, y, layer.mlp.down, chosen.down)
        return self.norm(h)

    def _chosen(self, num_tokens: int) -> LayerTiles | None:
        """None where the decoder as it was computes the step."""
        chosen = self._tiles.get(tiles.bucket(num_tokens) or 0, BY_LIBRARY)
        return chosen if num_tokens and (None not in chosen or self._may_multiply_raw) else None

    def _chain(self, num_tokens: int, history_is_settled: bool) -> DependentChain | None:
        return None if self._chosen(num_tokens) is None else DependentChain(self._counters, history_is_settled)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As Decoder.logits."""
        tile = self._head_tile(hidden)
        return super().logits(hidden) if tile is None else head.logits_launch(hidden, self.head.weight, tile)

    def draw(self, hidden: torch.Tensor, chances: SamplingMetadata) -> torch.Tensor:
        """As Decoder.draw."""
        tile = self._head_tile(hidden)
        return (
            super().draw(hidden, chances) if tile is None else head.draw_launch(hidden, self.head.weight, chances, tile)
        )

    def _head_tile(self, hidden: torch.Tensor) -> Tile | None:
        num_rows = hidden.shape[0]
        return self._head_tiles.get(tiles.bucket(num_rows) or 0) if num_rows else None

    def _project_qkv(
        self, layer: DecoderLayer, h: torch.Tensor, q: torch.Tensor, ctx: StepContext, rotation: Rotation,
        tile: Tile | None,
    ) -> None:  # fmt: skip
        """Fills q, writes the pages."""
        attention, eps = layer.attention, layer.input_norm.eps
        weight, bias = attention.qkv.weight, attention.qkv.bias
        if tile is not None:
            qkv_launch(h, weight, bias, eps, q, ctx.kv[0].pages, attention.plane, rotation, tile, self._counters)
            return
        norms = attention.qk_norm and (attention.qk_norm.q.weight, attention.qk_norm.k.weight)
        rotate_store.launch(h @ weight.t(), h, bias, norms, eps, q, ctx.kv[0].pages, attention.plane, rotation)

    def _attend(self, attention: Attention, q: torch.Tensor, ctx: StepContext, out: torch.Tensor) -> None:
        """Fills out from q, both [T, Hq · D]."""
        heads = q.shape[0], -1, attention.kv.format.width
        ctx.kv[0].attention.attend(q.view(heads), attention.plane, out.view(heads))

    def _gate_up(self, layer: DecoderLayer, h: torch.Tensor, y: torch.Tensor, tile: Tile | None) -> None:
        """Fills y."""
        linear, eps = layer.mlp.gate_up, layer.post_attention_norm.eps
        if tile is not None:
            swiglu_launch(h, linear.weight, linear.bias, eps, y, tile, self._counters)
        else:
            swiglu.norm_launch(h @ linear.weight.t(), h, linear.bias, eps, y)

    def _add(self, h: torch.Tensor, x: torch.Tensor, linear: Linear, tile: Tile | None) -> None:
        """h += W x + b."""
        if tile is not None:
            add_launch(h, x, linear.weight, linear.bias, tile, self._counters)
            return
        if linear.bias is not None:
            h.add_(linear.bias)
        h.addmm_(x, linear.weight.t())

    def _buffers(self, num_tokens: int, num_rows: int) -> tuple[torch.Tensor, ...]:
        """h, q, attention's result and SwiGLU's [num_tokens, …], each with memory for num_rows: kernels read whole tiles."""
        layer = self.layers[0]
        heads = layer.attention.output.in_features
        sizes = layer.attention.qkv.in_features, heads, heads, layer.mlp.down.in_features
        return tuple(torch.empty(num_rows, size, dtype=self.dtype, device=self.device)[:num_tokens] for size in sizes)

    def _num_counters(self) -> int:
        widest = max(leaf.out_features for leaf in self.layers[0].leaves() if isinstance(leaf, Linear))
        return max(widest // 16, MAX_DECODE_ROWS * self.kv_groups[0].format.heads)


def fuse(decoder: Decoder) -> FusedDecoder | None:
    """The loaded decoder with fused decode steps, or None where shapes, dtype, family or device do not allow them.

    Folds the norms' weights in place: use either of the two from then on, they compute the same.
    """
    if not can_fuse(decoder.device) or decoder.dtype not in (torch.bfloat16, torch.float16):
        return None
    if not all(_is_plain(layer) for layer in decoder.layers):
        return None
    has_wgmma = torch.cuda.get_device_capability(decoder.device)[0] == 9
    max_bytes = tiles.ring_bytes(torch.cuda.get_device_properties(decoder.device).shared_memory_per_block_optin)
    layer_tiles = choose_tiles(decoder, has_wgmma, max_bytes)
    if decoder.dtype == torch.float16 and None in layer_tiles[tiles.BUCKETS[0]]:
        return None
    fold_norms(decoder)
    return FusedDecoder(decoder, layer_tiles, choose_head_tiles(decoder, has_wgmma, max_bytes))


def choose_tiles(decoder: Decoder, has_wgmma: bool, max_bytes: int = tiles.SHARED_BYTES) -> dict[int, LayerTiles]:
    """For every bucket. The library multiplies what has no tile, and qkv where heads are normalised: a tile would have to hold one whole."""
    layer, head_dim = decoder.layers[0], decoder.kv_groups[0].format.width
    linears = layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down
    spans = head_dim // 2, 0, layer.mlp.down.in_features, 0
    chosen = {}
    for rows in tiles.BUCKETS:
        found = [
            tiles.choose(linear.out_features, linear.in_features, rows, span, has_wgmma=has_wgmma, max_bytes=max_bytes)
            for linear, span in zip(linears, spans, strict=True)
        ]
        if layer.attention.qk_norm is not None or head_dim not in gluon_decode.HEAD_DIMS:
            found[0] = None
        chosen[rows] = LayerTiles(*found)
    return chosen


def choose_head_tiles(decoder: Decoder, has_wgmma: bool, max_bytes: int = tiles.SHARED_BYTES) -> dict[int, Tile]:
    """For every bucket where a tile wins."""
    vocab_size, hidden_size = decoder.head.weight.shape
    found = {
        rows: tiles.choose(vocab_size, hidden_size, rows, 0, has_wgmma=has_wgmma, may_share=False, max_bytes=max_bytes)
        for rows in tiles.BUCKETS
    }
    return {rows: tile for rows, tile in found.items() if tile is not None}


def _is_plain(layer: DecoderLayer) -> bool:
    """Whether the layer's weights are what the kernels and the library multiply: as they are."""
    return all(type(leaf.method) is Unquantized for leaf in layer.leaves() if isinstance(leaf, Linear))


@torch.no_grad()
def fold_norms(decoder: Decoder) -> None:
    """Multiplies the weight of every layer's norms into the columns of the projections behind them; the norms keep ones."""
    for layer in decoder.layers:
        _fold(layer.input_norm, layer.attention.qkv)
        _fold(layer.post_attention_norm, layer.mlp.gate_up)


def _fold(norm: RMSNorm, linear: Linear) -> None:
    linear.weight.mul_(norm.weight)
    norm.weight.fill_(1.0)
