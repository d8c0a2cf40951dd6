"""Where keys and values land in the cache, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from photon_grpc.kernels.attention import write_kv


def new_tokens(count: int, kv_heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v as slices of one projection."""
    projection = torch.randn(count, 3 * kv_heads, size)
    return projection[:, kv_heads : 2 * kv_heads], projection[:, 2 * kv_heads :]


def by_rows(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    given = write_kv.stored(k, v, slots, cache.shape[4], None)
    write_kv.write_rows(given, write_kv.layer_rows(cache)[layer], write_kv.rows(slots, cache))


@pytest.mark.parametrize("write", [write_kv.reference, by_rows])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_every_token_lands_in_its_slot_and_nothing_else_changes(block_size: int, write: Callable[..., None]) -> None:
    cache = torch.randn(9, 3, 2, 2, block_size, 32)
    want = cache.clone()
    slots = torch.randperm(8 * block_size)[:13] + block_size
    k, v = new_tokens(13, 2, 32)
    for token, slot in enumerate(slots.tolist()):
        for head in range(2):
            want[slot // block_size, 2, 0, head, slot % block_size] = k[token, head]
            want[slot // block_size, 2, 1, head, slot % block_size] = v[token, head]
    write(k, v, cache, 2, slots)
    assert torch.equal(cache, want)
