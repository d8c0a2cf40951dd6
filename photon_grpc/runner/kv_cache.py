"""The tensors that block ids point into. Knows bytes, not owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from photon_grpc.core.kv import KVPlan
from photon_grpc.runner.upload import to_device


class KVCache:
    """The pages [num_blocks + 1, layers of a group, 2 (K, V), heads, block_size, width]; a block is one run of memory.

    Groups share the pages: a block belongs to the group whose table holds it. Block 0 is reserved: padding writes to
    it, and nothing reads it.
    """

    def __init__(self, plan: KVPlan, num_blocks: int, device: torch.device) -> None:
        self.plan = plan
        self.num_blocks = num_blocks
        kept = plan.format
        shape = (num_blocks + 1, plan.layers_per_block, kept.planes, kept.heads, plan.block_size, kept.width)
        # Fresh pages of a CPU's memory cost nothing until they are written; a device's memory is not fresh.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.pages = make(shape, dtype=getattr(torch, kept.dtype), device=device)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Duplicate blocks, (source, destination) pairs, without waiting for the device."""
        if not copies:
            return
        sources, destinations = to_device(copies, torch.int64, self.pages.device).T
        self.pages[destinations] = self.pages[sources]
