"""One id for each row of logits, without filters: the argmax, or a draw from the softmax by the Gumbel-max trick.

    id = argmax(logits / temperature + gumbel(seed, position, output index, token)),   argmax(logits) at temperature 0

position = context_len - num_prompt. INVALID (-1) where a row holds NaN or +infinity, or nothing above -infinity. Equal
values: the lowest id. Noise as in `noise.py`.

Shapes: logits [R, V] float32 or bf16, SamplingMetadata of the R rows -> int64 [R]. Bytes moved: the logits, once.

Two kernels: `draw` for a tile of one row's columns, `draw_merge` for the tiles of a row. The epilogue `store_best` of
`linear/epilogue.py` does what the first does with logits that are not written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.jit import cdiv, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.sampling import noise
from photon_grpc.kernels.sampling.noise import gumbel

#: Drawn for a row whose logits are not finite.
INVALID = -1


class SamplingMetadata(NamedTuple):
    """The argument of all that draws: each row's slot, and the parameters of every slot.

    slots: int64 [R]. context_len: int32 or int64 [R], tokens before the one to draw. temperature: float32 [S].
    seed (bit pattern of a uint64), output_index, num_prompt: int64 [S].
    """

    slots: torch.Tensor
    context_len: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    output_index: torch.Tensor
    num_prompt: torch.Tensor


def reference(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """draw in torch."""
    logits, slots = logits.float(), metadata.slots
    best, greedy = logits.max(-1)
    temperature, position = metadata.temperature[slots], metadata.context_len - metadata.num_prompt[slots]
    is_greedy = temperature <= 0.0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    drawn = scaled + noise.reference(metadata.seed[slots], position, metadata.output_index[slots], logits.shape[1])
    return torch.where(best.isfinite(), torch.where(is_greedy, greedy, drawn.argmax(-1)), INVALID)


@jit
def draw_kernel(logits, metadata, values, tops, ids, num_columns, stride, num_tiles, BLOCK: tl.constexpr):
    """Of one tile of one row: the best value and its id, and the highest logit (infinite where one is NaN)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    logit = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    slot = tl.load(metadata.slots + row)
    temperature = tl.load(metadata.temperature + slot)
    # The id means nothing where the highest is infinite, so NaN need not be told from it.
    top, number = tl.max(tl.where(logit != logit, float("inf"), logit), axis=0, return_indices=True)
    best = top
    if temperature > 0.0:
        position = tl.load(metadata.context_len + row) - tl.load(metadata.num_prompt + slot)
        seed, index = tl.load(metadata.seed + slot), tl.load(metadata.output_index + slot)
        gumbel_noise = gumbel(seed, position, index, column)
        value = tl.div_rn(logit, temperature) + gumbel_noise
        best, number = tl.max(tl.where(value == value, value, -float("inf")), axis=0, return_indices=True)
    place = row * num_tiles + tile
    tl.store(values + place, best)
    tl.store(tops + place, top)
    tl.store(ids + place, tile * BLOCK + number)


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


def config() -> dict[str, Any]:
    """Compile-time arguments of `draw`."""
    return {"BLOCK": 2048, "num_warps": 4}


def launch(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """int64 [R]; see `reference`. Rows of `logits` may be strided, columns not."""
    if not launches(logits):
        return reference(logits, metadata)
    num_rows, num_columns = logits.shape
    meta = config()
    tiles = cdiv(num_columns, meta["BLOCK"])
    values, tops = torch.empty((2, num_rows, tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, tiles), dtype=torch.int32, device=logits.device)
    if num_rows:
        numbers = num_columns, logits.stride(0), tiles
        draw_kernel[(num_rows, tiles)](logits, metadata, values, tops, ids, *numbers, **meta)
    return merge(values, tops, ids)


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
