"""Drawing in torch, and the second half of drawing on a device: the best of what every tile of a row has left; `draw.py` says what is drawn."""

from __future__ import annotations

import torch

from photon_grpc.kernels.jit import jit, next_power_of_2, tl
from photon_grpc.kernels.parts.gumbel import reference as noise_reference

#: Drawn for a row whose logits are not finite.
INVALID = -1
#: Below it a temperature is 0.
MIN_TEMPERATURE = 1e-5


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    output_index: torch.Tensor,
) -> torch.Tensor:
    """draw in torch."""
    wide = logits.float()
    best, greedy = wide.max(-1)
    is_greedy = temperature < MIN_TEMPERATURE
    scaled = wide / torch.where(is_greedy, 1.0, temperature)[:, None]
    drawn = (scaled + noise_reference(seed, position, output_index, wide.shape[1])).argmax(-1)
    return torch.where(best.isfinite(), torch.where(is_greedy, greedy, drawn), INVALID)


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
