"""One id for each row of logits, without filters: the argmax, or a draw from the softmax by the Gumbel-max trick.

    id = argmax(logits / temperature + gumbel(seed, position, output index, token)),   argmax(logits) where temperature is 0

position = context_len - num_prompt. INVALID (-1) where a row holds NaN or +infinity, or nothing above -infinity. Equal values: the lowest
id. Noise as in `noise.py`.

Shapes: logits [R, V] float32 or bf16, SamplingMetadata of the R rows -> int64 [R]. Bytes moved: the logits, once.

Two kernels: `draw` for a tile of one row's columns, `draw_merge` for the tiles of a row.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.sampling.best import INVALID, MIN_TEMPERATURE, SamplingMetadata, merge, reference
from photon_grpc.kernels.sampling.gumbel import gumbel

__all__ = ["INVALID", "MIN_TEMPERATURE", "SamplingMetadata", "launch", "reference"]


@jit
def draw_kernel(
    logits, slots, context_len, temperature, seed, output_index, num_prompt, values, tops, ids,
    num_columns, stride, num_tiles, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one tile of one row: the best value and its id, and the highest logit (infinite where one is NaN)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    logit = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    slot = tl.load(slots + row)
    heat = tl.load(temperature + slot)
    # The id means nothing where the highest is infinite, so NaN need not be told from it.
    top, number = tl.max(tl.where(logit != logit, float("inf"), logit), axis=0, return_indices=True)
    best = top
    if heat >= 1e-5:
        position = tl.load(context_len + row) - tl.load(num_prompt + slot)
        noise = gumbel(tl.load(seed + slot), position, tl.load(output_index + slot), column)
        value = tl.div_rn(logit, heat) + noise
        best, number = tl.max(tl.where(value == value, value, -float("inf")), axis=0, return_indices=True)
    place = row * num_tiles + tile
    tl.store(values + place, best)
    tl.store(tops + place, top)
    tl.store(ids + place, tile * BLOCK + number)


def config() -> dict[str, Any]:
    """Compile-time arguments of `draw`."""
    return {"BLOCK": 2048, "num_warps": 4}


def launch(logits: torch.Tensor, chances: SamplingMetadata) -> torch.Tensor:
    """int64 [R]; see `reference`. Rows of `logits` may be strided, columns not."""
    if not launches(logits):
        return reference(logits, chances)
    num_rows, num_columns = logits.shape
    meta = config()
    tiles = cdiv(num_columns, meta["BLOCK"])
    values, tops = torch.empty((2, num_rows, tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, tiles), dtype=torch.int32, device=logits.device)
    if num_rows:
        numbers = num_columns, logits.stride(0), tiles
        draw_kernel[(num_rows, tiles)](logits, *chances, values, tops, ids, *numbers, **meta)
    return merge(values, tops, ids)
