"""Latent attention of which every rank has a part of the heads; latents are whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from photon_grpc.config.latent import LatentSpec
from photon_grpc.layers.latent import LatentExpansion, OrderedLinear
from photon_grpc.layers.parallel.group import RankShare
from photon_grpc.layers.parallel.linears import ColumnParallelLinear, part_of
from photon_grpc.layers.parameter_owner import Target


class OrderedParallelLinear(OrderedLinear, ColumnParallelLinear):
    """A ColumnParallelLinear whose rows of W have another order in the checkpoint."""


class ParallelExpansion(LatentExpansion):
    """The part of an expansion for a rank's heads; `num_heads` are those of the model."""

    def __init__(self, name: str, num_heads: int, sizes: LatentSpec, dtype: torch.dtype, share: RankShare) -> None:
        super().__init__(name, num_heads // share.count, sizes, dtype)
        self._share = share

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight, part=part_of(self.weight.shape, 0, self._share))
