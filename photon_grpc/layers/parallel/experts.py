"""A feed-forward block of experts of which every rank has some, or a part of each."""

from __future__ import annotations

import torch

from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import Parts
from photon_grpc.layers.experts import Experts, Router, SparseMLP
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.group import Group
from photon_grpc.layers.parallel.linears import in_order
from photon_grpc.layers.workspace import Workspace


class ParallelSparseMLP(SparseMLP):
    """A block of which this rank has some experts, or a part of their intermediate size; every rank routes alike.

    A rank's sum over a token's experts is rounded before the ranks' sums are added, in float32.
    """

    def __init__(self, router: Router, experts: Experts, group: Group) -> None:
        super().__init__(router, experts)
        self._group = group

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        return in_order(self._group.gather(super().__call__(x, ctx).float())).to(x.dtype)

    def add_to(self, work: Workspace, norm: RMSNorm, ctx: StepContext) -> None:
        part = super().__call__(norm(work.h), ctx).float()
        if self._group.add(work.h, Parts(part.__getitem__), None, work.sums.partial, 1):
            work.written()
        else:
            work.outdated()
