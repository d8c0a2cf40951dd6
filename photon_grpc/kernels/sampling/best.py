"""Drawing in torch, and the second half of drawing on a device: the best of what every tile of a row has left; `draw.py` says what is drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.jit import jit, next_power_of_2, tl
from photon_grpc.kernels.sampling.gumbel import reference as noise_reference

#: Drawn for a row whose logits are not finite.
INVALID = -1
#: Below it a temperature is 0.
MIN_TEMPERATURE = 1e-5


class SamplingMetadata(NamedTuple):
    """By what the rows of a step draw: each row's slot, and the parameters of every slot.

    slots: int64 [R]. context_len: int32 or int64 [R], tokens before the one to draw. temperature: float32 [S].
    seed (bit pattern of a uint64), output_index, num_prompt: int64 [S].
    """

    slots: torch.Tensor
    context_len: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    output_index: torch.Tensor
    num_prompt: torch.Tensor


def reference(logits: torch.Tensor, chances: SamplingMetadata) -> torch.Tensor:
    """draw in torch."""
    wide, slots = logits.float(), chances.slots
    best, greedy = wide.max(-1)
    temperature, position = chances.temperature[slots], chances.context_len - chances.num_prompt[slots]
    is_greedy = temperature < MIN_TEMPERATURE
    scaled = wide / torch.where(is_greedy, 1.0, temperature)[:, None]
    noise = noise_reference(chances.seed[slots], position, chances.output_index[slots], wide.shape[1])
    return torch.where(best.isfinite(), torch.where(is_greedy, greedy, (scaled + noise).argmax(-1)), INVALID)


@jit
def draw_merge_kernel(values, tops, ids, out, num_tiles, TILES_PAD: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_PAD)
    inside = tile < num_tiles
    place = row * num_tiles + tile
    value = tl.load(values + place, mask=inside, other=-float("inf"))
    top = tl.max(tl.load(tops + place, mask=inside, other=-float("inf")), axis=0)
    number = tl.load(ids + place, mask=inside, other=2147483647)
    best = tl.max(value, axis=0)
    drawn = tl.min(tl.where(value == best, number, 2147483647), axis=0).to(tl.int64)
    finite = (top < float("inf")) & (top > -float("inf"))
    tl.store(out + row, tl.where(finite, drawn, -1))


def merge(values: torch.Tensor, tops: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [R] from what every tile has left, [R, tiles] each."""
    num_rows, tiles = values.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    if num_rows:
        pad = next_power_of_2(tiles)
        draw_merge_kernel[(num_rows,)](
            values, tops, ids, out, tiles, TILES_PAD=pad, num_warps=max(1, min(8, pad // 256))
        )
    return out
