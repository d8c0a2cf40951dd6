"""Numbers of pages of 8 bits: e4m3, times a constant of each layer, plane and head.

    page = e4m3(clamp((x - offset) · inverse, ±448)),  inverse = 1 / scale;      x ≈ page · scale + offset

`e4m3` is to the nearest, ties to even; NaN stays NaN. A floating format loses range by a wrong constant, not precision,
so constants need no row, no chunk and no neighbour: a key's number depends on the key alone. Numbers beyond the range
are counted (`saturated`), except in block 0, where padding goes.

Only keys have an offset, which is not added again: it changes all scores of a query by one number, which softmax does
not see. e4m3 has an error in proportion to the number, so keys without what all of them share are nearer to their own.

A product over keys takes the scale of keys into the scale of scores, one over values multiplies its result: numbers
of pages are exact in 16 bits. Constants that are powers of two (`power_of_two`) leave no other rounding than e4m3's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.formulas import round_e4m3
from photon_grpc.kernels.lang.jit import jit, tl

#: The type of numbers of 8 bits, and the largest of them.
PAGE_DTYPE = torch.float8_e4m3fn
LIMIT = 448.0


class PageScales(NamedTuple):
    """The constants of one layer's pages.

    scales, inverse: float32 [2, Hkv], of keys and of values. saturated: int64 [1], the numbers written so far that were
    beyond the range; layers may share it. offset: float32 [Hkv, D], of keys; None for those who only read pages.
    """

    scales: torch.Tensor
    inverse: torch.Tensor
    saturated: torch.Tensor
    offset: torch.Tensor | None = None

    @classmethod
    def ones(cls, kv_heads: int, saturated: torch.Tensor, head_dim: int = 0) -> PageScales:
        """Return scales of 1 on the device of `saturated`, and offsets of 0 if there is a head_dim."""
        one = torch.ones((2, kv_heads), dtype=torch.float32, device=saturated.device)
        offset = torch.zeros((kv_heads, head_dim), dtype=torch.float32, device=saturated.device) if head_dim else None
        return cls(one, one.clone(), saturated, offset)

    def to(self, device: torch.device | str) -> PageScales:
        """Return a copy on another device."""
        return PageScales(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]

    def set(self, scales: torch.Tensor, offset: torch.Tensor | None = None) -> None:
        """Change the constants in place to `scales` [2, Hkv], and `offset` [Hkv, D] if it is given."""
        self.scales.copy_(scales)
        self.inverse.copy_(1.0 / scales.float())
        if offset is not None and self.offset is not None:
            self.offset.copy_(offset)


def power_of_two(largest: float, headroom: float = 2.0) -> float:
    """Return the least power of two that keeps `headroom` · `largest` in range; 1 for nothing but zeros."""
    return 2.0 ** math.ceil(math.log2(headroom * largest / LIMIT)) if largest else 1.0


def quantized(x: torch.Tensor, scales: PageScales, slot_mapping: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return keys and values x [T, 2, Hkv, D] as numbers of pages, in torch, and count those beyond the range."""
    if scales.offset is not None:
        x = torch.stack((x[:, 0] - scales.offset, x[:, 1].float()), 1)
    scaled = x.float() * scales.inverse[..., None]
    beyond = (scaled.abs() > LIMIT).flatten(1).sum(1)
    scales.saturated.add_((beyond * (slot_mapping >= block_size)).sum())
    return scaled.clamp(-LIMIT, LIMIT).to(PAGE_DTYPE)


def dequantized(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of pages, as bytes, times `scales`, which broadcasts to them."""
    return (numbers.view(PAGE_DTYPE).float() * scales).to(dtype)


def of_layer(scales: Sequence[PageScales] | None, layer: int) -> PageScales | None:
    return None if scales is None else scales[layer]


@jit
def page_numbers(x, inverse, saturated, counted, LIMIT: tl.constexpr = 448.0):
    """Return x in float32 times `inverse` as e4m3 in float32; count what is beyond the range where `counted`."""
    scaled = x * inverse
    beyond = tl.abs(scaled) > LIMIT
    tl.atomic_add(saturated + beyond.to(tl.int32) * 0, beyond.to(tl.int64), mask=beyond & counted, sem="relaxed")
    clamped = tl.where(scaled > LIMIT, LIMIT, tl.where(scaled < -LIMIT, -LIMIT, scaled))
    return tl.where(scaled == scaled, round_e4m3(clamped), scaled)
