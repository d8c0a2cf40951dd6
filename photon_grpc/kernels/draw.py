"""One id for each row of logits, without filters: the argmax, or a draw from the softmax by the Gumbel-max trick.

    id = argmax(logits / temperature + gumbel(seed, position, output index, token)),   argmax(logits) where temperature is 0

INVALID (-1) where a row holds NaN or +infinity, or nothing above -infinity. Equal values: the lowest id. Noise as in `noise.py`.

Shapes: logits [R, V] float32 or bf16, temperature float32 [R], seed (bit pattern of a uint64), position, output_index int64 [R]
-> int64 [R]. Bytes moved: the logits, once.

Two kernels: `draw` for a tile of one row's columns, `draw_merge` for the tiles of a row.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.parts.best import INVALID, MIN_TEMPERATURE, merge, reference
from photon_grpc.kernels.parts.gumbel import gumbel

__all__ = ["INVALID", "MIN_TEMPERATURE", "launch", "reference"]


@jit
def draw_kernel(
    logits, temperature, seed, position, output_index, values, tops, ids, num_columns, stride, num_tiles,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one tile of one row: the best value and its id, and the highest logit (infinite where one is NaN)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    logit = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    top = tl.max(tl.where(logit != logit, float("inf"), logit), axis=0)
    heat = tl.load(temperature + row)
    value = logit
    if heat >= 1e-5:
        value = tl.div_rn(logit, heat)
        value += gumbel(tl.load(seed + row), tl.load(position + row), tl.load(output_index + row), column)
    value = tl.where(inside & (value == value), value, -float("inf"))
    best = tl.max(value, axis=0)
    place = row * num_tiles + tile
    tl.store(values + place, best)
    tl.store(tops + place, top)
    tl.store(ids + place, tl.min(tl.where((value == best) & inside, column, 2147483647), axis=0))


def config() -> dict[str, Any]:
    """Compile-time arguments of `draw`."""
    return {"BLOCK": 2048, "num_warps": 4}


def launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    output_index: torch.Tensor,
) -> torch.Tensor:
    """int64 [R]; see `reference`. Rows of `logits` may be strided, columns not."""
    if not launches(logits):
        return reference(logits, temperature, seed, position, output_index)
    num_rows, num_columns = logits.shape
    meta = config()
    tiles = cdiv(num_columns, meta["BLOCK"])
    values, tops = torch.empty((2, num_rows, tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, tiles), dtype=torch.int32, device=logits.device)
    if num_rows:
        rows = temperature, seed, position, output_index
        draw_kernel[(num_rows, tiles)](logits, *rows, values, tops, ids, num_columns, logits.stride(0), tiles, **meta)
    return merge(values, tops, ids)
