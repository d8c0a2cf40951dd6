"""Memory that GPUs of one machine write to each other, for sums of few rows (`kernels/linear/exchange.py`)."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from photon_grpc.kernels.linear import exchange

_LOG = logging.getLogger(__name__)

#: Rows of a plane: more than a decode step has, fewer than a prompt, which NCCL moves faster.
NUM_ROWS = 512
#: Read by torch when memory is shared: no NVLink multicast.
_VARIABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Planes:
    """The inboxes of all ranks, mapped here."""

    def __init__(self, inboxes: tuple[torch.Tensor, ...], rank: int, owner: Any = None) -> None:
        self._inboxes = inboxes
        self._rank = rank
        #: What keeps the mapping.
        self._owner = owner

    def take(self, h: torch.Tensor) -> bool:
        """Return whether a sum of these rows goes through planes."""
        _, _, num_rows, hidden = self._inboxes[self._rank].shape
        return h.shape[0] <= num_rows and h.shape[1] == hidden

    def add(
        self, h: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None, squares: torch.Tensor, plane: int
    ) -> None:
        """Change h by the parts of all ranks, and store the sums of its squares."""
        exchange.launch(h, part, bias, squares, self._inboxes, self._rank, plane)


def shared_planes(group: Any, device: torch.device, hidden_size: int) -> Planes | None:
    """Return planes between the GPUs of a group; None if they do not reach each other, or the size does not suit.

    All ranks call it; on all it returns the same.
    """
    rank, size = group.rank(), group.size()
    planes = None
    if hidden_size % 16 == 0 and NUM_ROWS:
        try:
            planes = _mapped(group, device, (exchange.NUM_PLANES, size, NUM_ROWS, hidden_size), rank, size)
        except Exception as error:
            _LOG.warning("GPUs exchange sums through NCCL alone (%s: %s)", type(error).__name__, error)
    have = torch.tensor([planes is not None], dtype=torch.int32, device=device)
    dist.all_reduce(have, dist.ReduceOp.MIN, group=group)
    return planes if int(have) else None


def _mapped(group: Any, device: torch.device, shape: tuple[int, ...], rank: int, size: int) -> Planes:
    os.environ.setdefault(_VARIABLE, "1")
    # Its interface is not stable yet; without it NCCL does the same, more slowly.
    from torch.distributed import _symmetric_memory as memory

    own = memory.empty(shape, dtype=torch.int32, device=device)
    own.fill_(exchange.EMPTY)
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(own, group)
    inboxes = tuple(own if peer == rank else handle.get_buffer(peer, shape, torch.int32) for peer in range(size))
    # No rank writes before all have emptied their inboxes.
    dist.barrier(group=group)
    return Planes(inboxes, rank, handle)
