"""Models of transformers over keys and values of 8 bits, rounded as they enter its cache by a formula of this file."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

#: The finite numbers of e4m3 from 0 up, from their definition: seven subnormal, then eight a power of two, without NaN.
_GRID = torch.tensor(
    [number * 2.0**-9 for number in range(8)]
    + [(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)],
    dtype=torch.float64,
)


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the value nearest to x [B, Hkv, N, D] among e4m3 times scale [Hkv]; of two as near the even one."""
    scaled = (x.double().abs() / scale.double()[:, None, None]).contiguous()
    above = torch.searchsorted(_GRID, scaled).clamp(max=len(_GRID) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = _GRID[above] - scaled, scaled - _GRID[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    nearest = torch.where(takes_above, _GRID[above], _GRID[below])
    return (nearest * scale.double()[:, None, None]).copysign(x.double()).to(x.dtype)


class EightBitCache(DynamicCache):
    """A cache whose every key and value is rounded before anyone attends to it, in its own chunk, too.

    scales: float32 [layers, 2, Hkv]. offsets: float32 [layers, Hkv, D], what is rounded of keys lies around them.
    """

    def __init__(self, config: Any, scales: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        super().__init__(config=config)
        self._scales = scales
        self._offsets = offsets
        #: Numbers beyond the range.
        self.num_saturated = 0

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = self._scales[layer_idx]
        offset = torch.zeros(()) if self._offsets is None else self._offsets[layer_idx][:, None]
        for numbers, scale in ((k - offset, keys), (v, values)):
            self.num_saturated += int((numbers.abs() > 448 * scale[:, None, None]).sum())
        return super().update(rounded(k - offset, keys) + offset, rounded(v, values), layer_idx, *args, **kwargs)


def ones(model: Any) -> torch.Tensor:
    config = model.config
    return torch.ones(config.num_hidden_layers, 2, config.num_key_value_heads)


@torch.inference_mode()
def logits_of(
    model: Any, ids: Sequence[int], scales: torch.Tensor, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 [len(ids), vocab_size]."""
    cache = EightBitCache(model.config, scales, offsets)
    logits: torch.Tensor = model(torch.tensor([list(ids)]), past_key_values=cache).logits[0]
    return logits.float()


@torch.inference_mode()
def greedy(
    model: Any, prompt: Sequence[int], num_tokens: int, scales: torch.Tensor, cache: EightBitCache | None = None
) -> list[int]:
    """Return the continuation of one prompt alone, token by token, over a new cache by default."""
    cache = cache or EightBitCache(copy.deepcopy(model.config), scales)
    ids, found = torch.tensor([list(prompt)]), []
    for _ in range(num_tokens):
        token = model(ids, past_key_values=cache).logits[0, -1].argmax()
        found.append(int(token))
        ids = token.view(1, 1)
    return found
