"""What the tokens of a step need to be rotated and stored, and how torch does it; `rotate_store.py` has the formula."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotation(NamedTuple):
    """One for all layers of a step.

    cos, sin: float32 [max_position, D/2]. positions, slot_mapping: int64 [M].
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


#: Weights [D] of the norms of query and of key heads.
Norms = tuple[torch.Tensor, torch.Tensor]


def reference(
    qkv: torch.Tensor, h: torch.Tensor | None, b: torch.Tensor | None, norms: Norms | None, eps: float,
    q: torch.Tensor, cache: torch.Tensor, layer: int, rotation: Rotation,
) -> None:  # fmt: skip
    """rotate_store in torch: fills q, changes cache."""
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    x = qkv.float()
    if h is not None:
        x = x * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + eps)
    if b is not None:
        x = x + b.float()
    heads = x.view(x.shape[0], -1, head_dim)
    queries, keys, values = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        queries, keys = (
            part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * weight.float()
            for part, weight in zip((queries, keys), norms, strict=True)
        )
    cos, sin = (table[rotation.positions].unsqueeze(1) for table in (rotation.cos, rotation.sin))
    queries, keys = (_rotated(part, cos, sin) for part in (queries, keys))
    q.copy_(queries.reshape(q.shape))
    slot = rotation.slot_mapping
    stored = torch.stack((keys, values), dim=1).to(cache.dtype)
    cache[:, layer][slot // block_size, :, :, slot % block_size] = stored


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
