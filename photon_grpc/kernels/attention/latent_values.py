"""From what attention over latents gives to the values of heads: lanes merged in their order, and expanded.

    o = Σ_lanes merged, divided by the sum of powers, rounded;  out[t, h] = W_v[h] o[t, h], one chain over R

Shapes: LaneParts of T tokens or o [T, Hq, R], weight [Hq · (P + V), R], of which each head's last V rows are W_v, or
None (out is o) -> out [T, Hq, V] or [T, Hq, R]. bf16, fp16, fp32.
Bytes moved: lanes · T · Hq · R · 4, and the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.latent_lanes import merged
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl


class LaneParts(NamedTuple):
    """The results of lanes: largest scores and sums of powers [T, Hq, lanes], sums of values [T, Hq, lanes, R].

    lanes: int32 [T], those that each token has.
    """

    most: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor
    lanes: torch.Tensor


class ValueTile(NamedTuple):
    """The constants of a program: BM tokens of a head, BV of its values; 0: the weight is None.

    LANES: those that are read at a time.
    """

    NUM_HEADS: int
    RANK: int
    RANK_PAD: int
    PLAIN: int
    VALUE: int
    BM: int
    LANES: int
    BV: int
    PRECISION: str = "ieee"


def reference(o: torch.Tensor, weight: torch.Tensor, plain: int) -> torch.Tensor:
    """Return out in torch from o [T, Hq, R]."""
    values = weight.view(o.shape[1], -1, o.shape[2])[:, plain:]
    return torch.bmm(o.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


@jit
def merged_lanes(parts, token, head, has, num_lanes, C: tl.constexpr):
    """Return o [BM, RANK_PAD] of one head in float32; zeros for tokens without lanes."""
    BM: tl.constexpr = C.BM
    RANK_PAD: tl.constexpr = C.RANK_PAD
    LANES: tl.constexpr = C.LANES
    plain = tl.arange(0, RANK_PAD)
    # Of tokens that belong to no row they are anything.
    lanes = tl.minimum(tl.load(parts[3] + token, mask=has, other=0), num_lanes)
    place = (token.to(tl.int64) * C.NUM_HEADS + head) * num_lanes
    most = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, RANK_PAD], tl.float32)
    for first in range(0, tl.max(lanes, 0), LANES):
        for i in tl.static_range(LANES):
            lane = first + i
            real = lane < lanes
            inside = real[:, None] & (plain < C.RANK)[None, :]
            lane_most = tl.load(parts[0] + place + lane, mask=real, other=-float("inf"))
            lane_total = tl.load(parts[1] + place + lane, mask=real, other=0.0)
            lane_acc = tl.load(parts[2] + (place + lane)[:, None] * C.RANK + plain[None, :], mask=inside, other=0.0)
            most, total, acc = merged((most, total, acc), (lane_most, lane_total, lane_acc))
    return tl.where((lanes > 0)[:, None], acc / total[:, None], 0.0)


@jit
def value_kernel(o, parts, weight, out, num_tokens, num_lanes, C: tl.constexpr, PDL: tl.constexpr):
    """Write BV values of one head of BM tokens per program."""
    token = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    head = tl.program_id(1)
    has = token < num_tokens
    plain = tl.arange(0, C.RANK_PAD)
    if C.BV > 0:
        value = tl.program_id(2) * C.BV + tl.arange(0, C.BV)
        of_head = weight + head.to(tl.int64) * ((C.PLAIN + C.VALUE) * C.RANK)
        w_at, w_in = (C.PLAIN + value)[:, None] * C.RANK + plain[None, :], (value < C.VALUE)[:, None]
        w = tl.load(of_head + w_at, mask=w_in & (plain < C.RANK)[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = token.to(tl.int64) * C.NUM_HEADS + head
    inside = has[:, None] & (plain < C.RANK)[None, :]
    if parts is not None:
        tile = merged_lanes(parts, token, head, has, num_lanes, C).to(out.dtype.element_ty)
    else:
        tile = tl.load(o + pair[:, None] * C.RANK + plain[None, :], mask=inside, other=0.0)
    if C.BV > 0:
        if C.BM < 16:
            # A product has 16 rows at least: those of the tokens again and again, of which the first are kept.
            rows = tl.broadcast_to(tile[None, :, :], [16 // C.BM, C.BM, C.RANK_PAD])
            tile = tl.reshape(rows, [16, C.RANK_PAD])
            of_row = tl.arange(0, 16)
            token = tl.program_id(0) * C.BM + of_row % C.BM
            has = (token < num_tokens) & (of_row < C.BM)
            pair = token.to(tl.int64) * C.NUM_HEADS + head
        values = tl.dot(tile, tl.trans(w), input_precision=C.PRECISION).to(out.dtype.element_ty)
        to = out + pair[:, None] * C.VALUE + value[None, :]
        tl.store(to, values, mask=has[:, None] & (value < C.VALUE)[None, :])
    else:
        tl.store(out + pair[:, None] * C.RANK + plain[None, :], tile, mask=inside)


def tile_of(
    num_tokens: int, heads: tuple[int, int, int, int], itemsize: int, *, has_parts: bool
) -> ValueTile:  # fmt: skip
    """Return the tile of a step of so many tokens; `heads`: NUM_HEADS, RANK, PLAIN, VALUE, 0: nothing is expanded."""
    num_heads, rank, plain, value = heads
    most = 32 if num_tokens <= 16 or itemsize == 4 else 64
    of_tokens = 16 if num_tokens <= 64 or itemsize == 4 or has_parts else 64
    if has_parts and value:
        # Few programs would take long to merge many lanes.
        of_tokens = next((size for tokens, size in TOKENS if num_tokens <= tokens), of_tokens)
    columns = min(most, max(16, next_power_of_2(value))) if value else 0
    lanes = LANES if has_parts and itemsize == 2 and value else 1
    return ValueTile(num_heads, rank, max(16, next_power_of_2(rank)), plain, value, of_tokens, lanes, columns)


#: Lanes that are read at a time.
LANES = 4
#: (tokens, those of a program) in rising order, where lanes are merged.
TOKENS = ((16, 2), (48, 4))


def launch(
    o: torch.Tensor | None, parts: LaneParts | None, weight: torch.Tensor | None, plain: int, out: torch.Tensor
) -> None:
    """Fill out [T, Hq, V] from o or from parts; without a weight from parts, out [T, Hq, R]."""
    (num_tokens, num_heads, size), device = out.shape, out.device
    if not launches(out) or (o is None and parts is None):
        assert o is not None and weight is not None
        out.copy_(reference(o, weight, plain))
        return
    rank = size if weight is None else weight.shape[1]
    heads = num_heads, rank, plain, size if weight is not None else 0
    tile = tile_of(num_tokens, heads, out.element_size(), has_parts=parts is not None)
    num_lanes = 0 if parts is None else parts.most.shape[2]
    if num_tokens:
        grid = cdiv(num_tokens, tile.BM), num_heads, cdiv(size, tile.BV) if tile.BV else 1
        value_kernel[grid](
            o, parts, weight, out, num_tokens, num_lanes, C=tile, num_warps=8, **dependent_launch(device)
        )  # fmt: skip
