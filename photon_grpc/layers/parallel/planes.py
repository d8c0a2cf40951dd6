"""Memory that GPUs of one machine write to each other, for sums over ranks (`kernels/linear/exchange.py`).

Of few rows the product that makes a part pushes it, or the kernel that adds the parts. Parts of more rows are copied,
which takes no multiprocessor, while the next rows are multiplied. Every piece has a plane that all others have emptied
when it is sent, so nothing else is waited for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from photon_grpc.kernels.lang.streams import launching_on, stream_of
from photon_grpc.kernels.linear import exchange
from photon_grpc.layers.ends import Parts, Places

_LOG = logging.getLogger(__name__)

#: Rows whose parts a kernel pushes: more than a decode step has.
NUM_PUSHED = 512
#: Rows of a plane. Parts of more rows than are pushed are made and sent in pieces of at most so many.
NUM_ROWS = 1024
#: Planes of each of a layer's sums for pieces: a rank sends piece n when it has taken piece n - 2, which another one
#: sent when it had taken piece n - 4.
NUM_SENT = 4
#: Read by torch when memory is shared: no NVLink multicast.
_VARIABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Planes:
    """The inboxes of all ranks, mapped here."""

    def __init__(self, inboxes: tuple[torch.Tensor, ...], rank: int, owner: Any = None) -> None:
        self._inboxes = inboxes
        self._rank = rank
        #: What keeps the mapping.
        self._owner = owner
        device = inboxes[rank].device
        self._sending = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        #: Of every plane: a part is made, and has gone. To make an event anew for each takes the host longer.
        self._events = [
            (torch.cuda.Event(), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(inboxes[rank].shape[0])
        ]
        #: Of every plane: this rank's place in the inboxes of the others.
        others = [(peer, inbox) for peer, inbox in enumerate(inboxes) if peer != rank]
        self._places: list[Places] = [
            tuple(inbox[plane, rank - (rank > peer)] for peer, inbox in others)
            for plane in range(inboxes[rank].shape[0])
        ]

    def take(self, h: torch.Tensor) -> bool:
        """Return whether sums of rows of this size go through planes."""
        return h.shape[1] == self._inboxes[self._rank].shape[3]

    def add(self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int) -> None:
        """Change h by the parts of all ranks, and store the sums of its squares."""
        if h.shape[0] > NUM_PUSHED:
            return self._add_pieces(h, parts, bias, squares, site)
        part = parts.whole if parts.pushed is None else parts.pushed(self._places[site])
        return exchange.launch(h, part, bias, squares, self._inboxes, self._rank, site, pushes=parts.pushed is None)

    def _add_pieces(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int
    ) -> None:
        """Add in pieces of rows: while one is made the one before is on its way."""
        main = stream_of(h.device)
        take: Callable[[], None] | None = None
        for number, rows in enumerate(pieces(h.shape[0])):
            part, plane = parts.of(rows), plane_of(site, number)
            self._send(part, plane, main)
            if take is not None:
                take()
            take = partial(self._take, (h[rows], part, bias, squares[rows]), plane, main)
        if take is not None:
            take()

    def _send(self, part: torch.Tensor, plane: int, main: torch.cuda.Stream) -> None:
        """Copy a part into the inboxes of the others, beside what the main stream computes."""
        made, has_gone = self._events[plane]
        made.record(main)
        self._sending.wait_event(made)
        with launching_on(self._sending):
            for place in self._places[plane]:
                place[: len(part)].copy_(part.view(torch.int32))
        has_gone.record(self._sending)

    def _take(self, sums: tuple[Any, ...], plane: int, main: torch.cuda.Stream) -> None:
        _, has_gone = self._events[plane]
        # The part's memory is used again.
        main.wait_event(has_gone)
        exchange.launch(*sums, self._inboxes, self._rank, plane, pushes=False, is_chained=False)


def pieces(num_rows: int) -> Iterator[slice]:
    """Return at least two pieces of about equal numbers of rows, of at most NUM_ROWS."""
    count = max(2, -(-num_rows // NUM_ROWS))
    return (slice(at * num_rows // count, (at + 1) * num_rows // count) for at in range(count))


def plane_of(site: int, piece: int) -> int:
    """Return the plane of a piece of a sum. Sums that follow each other have none in common."""
    return exchange.NUM_PLANES + NUM_SENT * site + piece % NUM_SENT


def shared_planes(group: Any, device: torch.device, hidden_size: int) -> Planes | None:
    """Return planes between the GPUs of a group; None if they do not reach each other, or the size does not suit.

    All ranks call it; on all it returns the same.
    """
    rank, size = group.rank(), group.size()
    planes = None
    if hidden_size % 16 == 0:
        try:
            planes = _mapped(group, device, (plane_of(1, -1) + 1, size - 1, NUM_ROWS, hidden_size), rank, size)
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
