"""A finished decoder whose decode steps take five kernels a layer: norm + qkv + rotary + page write, attention, output +
residual, norm + gate and up + SwiGLU, down + residual.

There is one set of weights. `fuse` multiplies the weight of every norm into the projection behind it, once and in place, and
leaves ones in the norm: prompts and large batches go on through the decoder as it was.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels import decode_attention, embed
from photon_grpc.kernels.fused_linear import Rotation, add_launch, qkv_launch, swiglu_launch
from photon_grpc.kernels.parts import tiles
from photon_grpc.kernels.parts.gluon import can_fuse
from photon_grpc.kernels.parts.tiles import Tile
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.linear import Linear, Unquantized
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.models.decoder import Decoder, DecoderLayer


class LayerTiles(NamedTuple):
    """How the four projections of a layer are multiplied, for one bucket of rows."""

    qkv: Tile
    output: Tile
    gate_up: Tile
    down: Tile


class FusedDecoder(Decoder):
    """The decoder it was made from, with a faster `forward` for steps of one token a row.

    Args:
        decoder: loaded, its norms folded; its parts are shared.
        layer_tiles: bucket of rows -> tiles; steps of more rows than the largest take the ordinary path.
    """

    def __init__(self, decoder: Decoder, layer_tiles: dict[int, LayerTiles]) -> None:
        super().__init__(
            decoder.embedding,
            decoder.layers,
            decoder.norm,
            decoder.head,
            dtype=decoder.dtype,
            device=decoder.device,
            max_model_len=decoder.max_model_len,
        )
        self.max_rows = max(layer_tiles)
        self._tiles = layer_tiles
        self._rotary = decoder.layers[0].attention.rotary
        # Zero before and after every kernel that counts its programs; each kernel of a step waits for the one before.
        self._counters = torch.zeros(self._num_counters(), dtype=torch.int32, device=decoder.device)

    def forward(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """As Decoder.forward. A decode step allocates by its shape alone and can be captured."""
        num_rows = token_ids.shape[0]
        if ctx.attention.max_query_len != 1 or not 0 < num_rows <= self.max_rows:
            return super().forward(token_ids, ctx)
        return self.norm(self._decode(token_ids, ctx))

    def _decode(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[M] -> residual stream behind the last layer, [M, hidden_size]."""
        num_rows, counters = token_ids.shape[0], self._counters
        h, q, attended, y = self._buffers(num_rows)
        rotation = Rotation(self._rotary.cos, self._rotary.sin, ctx.positions, ctx.slot_mapping.long(), ctx.num_tokens)
        tile = self._tiles[tiles.bucket(num_rows)]
        embed.launch(self.embedding.weight, token_ids, h)
        for layer in self.layers:
            attention, mlp, eps = layer.attention, layer.mlp, layer.input_norm.eps
            qkv = attention.qkv
            qkv_launch(h, qkv.weight, qkv.bias, eps, q, ctx.cache, attention.layer, rotation, tile.qkv, counters)
            decode_attention.launch(
                q, ctx.cache, attention.layer, ctx.attention, attended, counters,
                history_is_settled=ctx.history_is_settled,
            )  # fmt: skip
            add_launch(h, attended, attention.output.weight, attention.output.bias, tile.output, counters)
            eps = layer.post_attention_norm.eps
            swiglu_launch(h, mlp.gate_up.weight, mlp.gate_up.bias, eps, y, tile.gate_up, counters)
            add_launch(h, y, mlp.down.weight, mlp.down.bias, tile.down, counters)
        return h

    def _buffers(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """h, q, attention's result and SwiGLU's [num_rows, …], each with memory for the whole bucket behind it."""
        layer = self.layers[0]
        heads = layer.attention.output.in_features
        sizes = layer.attention.qkv.in_features, heads, heads, layer.mlp.down.in_features
        rows = tiles.bucket(num_rows)
        return tuple(torch.empty(rows, size, dtype=self.dtype, device=self.device)[:num_rows] for size in sizes)

    def _num_counters(self) -> int:
        widest = max(leaf.out_features for leaf in self.layers[0].leaves() if isinstance(leaf, Linear))
        return max(widest // 16, self.max_rows * self.kv_specs[0].num_kv_heads)


def fuse(decoder: Decoder) -> FusedDecoder | None:
    """The loaded decoder with fused decode steps, or None where shapes, dtype, family or device do not allow them.

    Folds the norms' weights in place: use either of the two from then on, they compute the same.
    """
    if not can_fuse(decoder.device) or decoder.dtype not in (torch.bfloat16, torch.float16):
        return None
    if not all(_is_plain(layer) for layer in decoder.layers):
        return None
    layer_tiles = choose_tiles(decoder)
    if not layer_tiles:
        return None
    fold_norms(decoder)
    return FusedDecoder(decoder, layer_tiles)


def choose_tiles(decoder: Decoder) -> dict[int, LayerTiles]:
    """For every bucket, up to the first that one of the four projections has no tile for."""
    layer = decoder.layers[0]
    linears = layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down
    spans = decoder.kv_specs[0].head_dim // 2, 0, layer.mlp.down.in_features, 0
    has_wgmma = torch.cuda.get_device_capability(decoder.device)[0] == 9
    chosen = {}
    for rows in tiles.BUCKETS:
        found = [
            tiles.choose(linear.out_features, linear.in_features, rows, span, has_wgmma=has_wgmma)
            for linear, span in zip(linears, spans, strict=True)
        ]
        if rows > tiles.MAX_ROWS or None in found:
            break
        chosen[rows] = LayerTiles(*found)  # type: ignore[arg-type]
    return chosen


def _is_plain(layer: DecoderLayer) -> bool:
    """Whether the layer is what the kernels compute: weights as they are, no norm of heads (it would need whole heads)."""
    linears = [leaf for leaf in layer.leaves() if isinstance(leaf, Linear)]
    num_heads, spec = layer.attention.output.in_features // layer.attention.spec.head_dim, layer.attention.spec
    return (
        layer.attention.qk_norm is None
        and all(type(linear.method) is Unquantized for linear in linears)
        and spec.head_dim in decode_attention.HEAD_DIMS
        and num_heads // spec.num_kv_heads <= decode_attention.MAX_GROUP
    )


@torch.no_grad()
def fold_norms(decoder: Decoder) -> None:
    """Multiplies the weight of every layer's norms into the columns of the projections behind them; the norms keep ones."""
    for layer in decoder.layers:
        _fold(layer.input_norm, layer.attention.qkv)
        _fold(layer.post_attention_norm, layer.mlp.gate_up)


def _fold(norm: RMSNorm, linear: Linear) -> None:
    linear.weight.mul_(norm.weight)
    norm.weight.fill_(1.0)
