"""Memory that GPUs of one machine write to each other, for sums over ranks (`kernels/linear/exchange.py`).

Of few rows the kernel that adds the parts pushes them. Parts of more rows are copied, which takes no multiprocessor,
while the next rows are multiplied. Every piece has a plane that all others have emptied when it is sent, so nothing
else is waited for. More than two ranks have no planes for pieces.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from photon_grpc.kernels.lang.streams import launching_on, stream_of
from photon_grpc.kernels.linear import exchange
from photon_grpc.layers.epilogues import Parts, Pending

_LOG = logging.getLogger(__name__)

#: Planes of each of a layer's sums for pieces: a rank sends piece n when it has taken piece n - 2, which another one
#: sent when it had taken piece n - 4.
NUM_SENT = 4
#: Read by torch when memory is shared: no NVLink multicast.
_VARIABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


#: A plane's memory of all ranks, int32 [size - 1, rows, H] each, mapped here.
Plane = tuple[torch.Tensor, ...]


class Planes:
    """Sums over ranks by memory of all: planes for few rows, and planes, or none, for pieces of many.

    Args:
        owner: what keeps the mapping.
    """

    def __init__(self, few: Sequence[Plane], many: Sequence[Plane], rank: int, owner: Any = None) -> None:
        self._few, self._many, self._rank, self._owner = few, many, rank, owner
        self._places = [places(plane, rank) for plane in many]
        #: Rows of a piece.
        self.piece_rows = many[0][rank].shape[1] if many else 0
        self._sending = torch.cuda.Stream(few[0][rank].device)  # type: ignore[no-untyped-call]
        #: Of every plane for pieces: a part is made, and has gone. To make events anew takes the host longer.
        self._events = [
            (torch.cuda.Event(), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in many
        ]

    def take(self, h: torch.Tensor) -> bool:
        """Return whether sums of so many rows of this size go through planes."""
        has_planes = bool(self._many) or h.shape[0] <= exchange.NUM_PUSHED
        return has_planes and h.shape[1] == self._few[0][self._rank].shape[2]

    def add(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int,
        pending: Pending | None = None,
    ) -> None:  # fmt: skip
        """Change h by the parts of all ranks, and store the sums of its squares; arguments as of Group.add."""
        if h.shape[0] > exchange.NUM_PUSHED:
            sent = self._sent(h, parts, bias, squares, site)
            is_long = h.shape[0] > NUM_SENT * self.piece_rows
            return take_all(sent) if pending is None or is_long else pending.extend(sent)
        return exchange.launch(h, parts.whole, bias, squares, self._few[site], self._rank)

    def _sent(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int
    ) -> Iterator[tuple[slice, Callable[[], None]]]:
        """Make and send pieces of rows; return the rows of each and what takes it."""
        main = stream_of(h.device)
        for number, rows in enumerate(pieces(h.shape[0], self.piece_rows)):
            part, plane = parts.of(rows), plane_of(site, number)
            self._send(part, plane, main)
            yield rows, partial(self._take, (h[rows], part, bias, squares[rows]), plane, main)

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
        exchange.launch(*sums, self._many[plane], self._rank, pushes=False)


def take_all(sent: Iterable[tuple[slice, Callable[[], None]]]) -> None:
    """Take each piece when the next one has been made and sent."""
    before: Callable[[], None] | None = None
    for _, take in sent:
        if before is not None:
            before()
        before = take
    if before is not None:
        before()


def places(plane: Plane, rank: int) -> tuple[torch.Tensor, ...]:
    """Return the place of a rank's part in the memory of the others."""
    return tuple(memory[rank - (rank > peer)] for peer, memory in enumerate(plane) if peer != rank)


def pieces(num_rows: int, most: int) -> Iterator[slice]:
    """Return at least two pieces of about equal numbers of rows, of at most so many."""
    count = max(2, -(-num_rows // most))
    return (slice(at * num_rows // count, (at + 1) * num_rows // count) for at in range(count))


def plane_of(site: int, piece: int) -> int:
    """Return the plane of a piece of a sum. Sums that follow each other have none in common."""
    return NUM_SENT * site + piece % NUM_SENT


def shared_planes(group: Any, device: torch.device, hidden_size: int) -> Planes | None:
    """Return planes between the GPUs of a group; None if they do not reach each other, or the size does not suit.

    All ranks call it; on all it returns the same.
    """
    planes = None
    if hidden_size % 16 == 0:
        try:
            planes = _mapped(group, device, hidden_size)
        except Exception as error:
            _LOG.warning("GPUs exchange sums through NCCL alone (%s: %s)", type(error).__name__, error)
    have = torch.tensor([planes is not None], dtype=torch.int32, device=device)
    dist.all_reduce(have, dist.ReduceOp.MIN, group=group)
    return planes if int(have) else None


def _mapped(group: Any, device: torch.device, hidden_size: int) -> Planes:
    os.environ.setdefault(_VARIABLE, "1")
    # Its interface is not stable yet; without it NCCL does the same, more slowly.
    from torch.distributed import _symmetric_memory as memory

    rank, size = group.rank(), group.size()
    few = exchange.NUM_PLANES, size - 1, exchange.NUM_PUSHED, hidden_size
    num_many = 2 * NUM_SENT if exchange.sends_pieces(size) else 0
    many = num_many, size - 1, exchange.piece_rows(hidden_size), hidden_size
    num_few, num_words = math.prod(few), math.prod(few) + math.prod(many)
    own = memory.empty((num_words,), dtype=torch.int32, device=device)
    own.fill_(exchange.EMPTY)
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(own, group)
    found = [own if peer == rank else handle.get_buffer(peer, (num_words,), torch.int32) for peer in range(size)]
    # No rank writes before all have emptied their inboxes.
    dist.barrier(group=group)
    of_few, of_many = (
        list(zip(*(words.view(shape) for words in part), strict=True))
        for shape, part in ((few, [words[:num_few] for words in found]), (many, [words[num_few:] for words in found]))
    )
    return Planes(of_few, of_many, rank, handle)
