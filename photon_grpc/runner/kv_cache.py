"""The tensors that block ids index. Knows bytes, not owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from photon_grpc.core.kv import KVPlan
from photon_grpc.kernels.dtypes import dtype_of
from photon_grpc.runner.upload import to_device


class KVCache:
    """The pages: for each section of the plan [num_blocks + 1, layers, planes (K, V), heads, block_size, width].

    A block is one run of memory in every section. Groups share the pages: a block belongs to the group whose table
    holds it. Block 0 is reserved: padding writes to it, and nothing reads it.
    """

    def __init__(self, plan: KVPlan, num_blocks: int, device: torch.device) -> None:
        self.plan = plan
        self.num_blocks = num_blocks
        # Fresh pages of a CPU's memory cost nothing until they are written; a device's memory is not fresh.
        make = torch.empty if device.type == "cpu" else torch.zeros
        #: By the number of the section.
        self.pages = tuple(
            make(
                (num_blocks + 1, num_layers, kept.planes, kept.heads, plan.block_size, kept.width),
                dtype=dtype_of(kept.dtype),
                device=device,
            )
            for kept, num_layers in plan.sections
        )
        # Few operations know numbers of 8 bits; a copy needs only their bytes.
        self._copied = [pages.view(torch.uint8) if pages.itemsize == 1 else pages for pages in self.pages]
        self._device = device

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Duplicate blocks, (source, destination) pairs, in every section, without waiting for the device."""
        if not copies:
            return
        sources, destinations = to_device(copies, torch.int64, self._device).T
        for pages in self._copied:
            pages[destinations] = pages[sources]
