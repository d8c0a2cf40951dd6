"""The buffers of one step in a chain of fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear.fused_linear import ResidualStream
from photon_grpc.kernels.rotary.rotate_store import Rotation


@dataclass(slots=True, eq=False)
class RowSums:
    """The sums of squares of the residual stream, partial [M, hidden_size / 16], and whether h has changed since.

    pending: pieces of h whose sum over ranks is on its way, in their order, and what waits for it.
    """

    partial: torch.Tensor
    is_current: bool = False
    pending: list[tuple[slice, Callable[[], None]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The buffers of M tokens; each has memory for `bucket` rows if that is more: kernels read whole tiles.

    bucket: that of M, by `layers/epilogues.py`. h: [M, hidden_size], the residual stream; sums: those of its squares.
    q, attended: [M, Hq · D], attention's input and result. y: [M, intermediate_size]. rotation: that of the M tokens.
    counters: int32, zero before and after each kernel that counts its programs.
    """

    bucket: int
    h: torch.Tensor
    sums: RowSums
    q: torch.Tensor
    attended: torch.Tensor
    y: torch.Tensor
    rotation: Rotation
    counters: torch.Tensor

    def take(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Store x + residual in h, unless they are there already."""
        if residual is not None:
            torch.add(x, residual, out=self.h)
            self.sums.is_current = False
        elif x is not self.h:
            self.h.copy_(x)
            self.sums.is_current = False

    def stream(self) -> ResidualStream:
        """Return the residual stream with the sums of its squares, computed now if the kernel that wrote h did not."""
        self.settle()
        if not self.sums.is_current:
            squares.launch(self.h, self.written())
        return ResidualStream(self.h, self.sums.partial)

    def written(self) -> torch.Tensor:
        """Return the place of the sums for a kernel that writes h and leaves them."""
        self.sums.is_current = True
        return self.sums.partial

    def pieces(self) -> Iterator[slice]:
        """Return the rows of h in pieces, each when its sum over ranks has come; all at once if none is on its way."""
        pending, self.sums.pending = self.sums.pending, []
        if not pending:
            yield slice(None)
        for rows, take in pending:
            take()
            yield rows

    def settle(self) -> None:
        """Wait for all of h."""
        for _ in self.pieces():
            """Each is waited for."""

    def outdated(self) -> None:
        """Note that h was written by a kernel that leaves no sums."""
        self.sums.is_current = False
