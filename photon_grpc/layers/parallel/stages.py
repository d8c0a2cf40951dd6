"""Layers of which every rank has consecutive ones, a stage; the stages compute one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from photon_grpc.layers.parallel.group import Group


class Stages:
    """The stages of a model, of which this rank has one. All have the first's input and the last's result."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def is_last(self) -> bool:
        return self.group.rank == self.group.size - 1

    def layers(self, num_layers: int) -> range:
        """Return the numbers of this stage's layers."""
        first, behind = (stage * num_layers // self.group.size for stage in (self.group.rank, self.group.rank + 1))
        return range(first, behind)

    def __call__(self, x: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what the stages make of x [T, H], on all ranks; `own` is what this one does."""
        for stage in range(self.group.size):
            if stage == self.group.rank:
                x = own(x)
            # The others give what nobody reads.
            x = self.group.gather(x)[stage]
        return x
