"""The tensors that block ids point into. Knows bytes, not owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from photon_grpc.core.kv import KVGroup, KVSpec
from photon_grpc.errors import ModelLoadError
from photon_grpc.runner.upload import to_device


class KVCache:
    """pages [num_blocks + 1, layers, 2, num_kv_heads, block_size, head_dim]: one block of all layers is one run of memory.

    Block 0 is reserved: padding writes there and nobody reads it.
    """

    def __init__(
        self, specs: Sequence[KVSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.groups = kv_groups(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size
        spec = specs[0]
        shape = (num_blocks + 1, len(specs), 2, spec.num_kv_heads, block_size, spec.head_dim)
        # Fresh pages of a CPU's memory cost nothing until they are written; a device's memory is not fresh.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.pages = make(shape, dtype=dtype, device=device)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Duplicates blocks, (source, destination) pairs, without waiting for the device."""
        if not copies:
            return
        sources, destinations = to_device(copies, torch.int64, self.pages.device).T
        self.pages[destinations] = self.pages[sources]


def kv_groups(specs: Sequence[KVSpec]) -> tuple[KVGroup, ...]:
    """All layers in one group. Raises ModelLoadError where layers differ in what they keep."""
    if len(set(specs)) != 1 or specs[0].window:
        raise ModelLoadError("layers that keep different keys and values are not supported")
    return (KVGroup(specs[0], tuple(range(len(specs)))),)


def block_bytes(specs: Sequence[KVSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * block_size * dtype.itemsize
