"""Ranks that compute the same step, each with its part of every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from photon_grpc.kernels.lang.jit import DRY_RUN, launches
from photon_grpc.kernels.linear import exchange, slices
from photon_grpc.layers.epilogues import Parts, Pending


class Group(Protocol):
    """Ranks 0 … size - 1 that compute the same step."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's `part`, in the order of ranks: [...] -> [size, ...], equal on all to the bit."""

    def add(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int,
        pending: Pending | None = None,
    ) -> bool:  # fmt: skip
        """Change h [T, H] by the sum of all ranks' parts and the bias, equal on all to the bit.

        Return whether `squares` has the sums of its squares. Calls alternate between sites 0 and 1. A group may append
        to `pending` pieces of h whose sum is still on its way; all are waited for before the next call.
        """


class GroupOfOne:
    """This process alone."""

    rank = 0
    size = 1

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part[None]

    def add(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int,
        pending: Pending | None = None,
    ) -> bool:  # fmt: skip
        return add_gathered(self, h, parts.whole, bias)


class LoneRank(NamedTuple):
    """A rank alone, which takes its own part in place of the others': shapes and kernels are right, values are not."""

    rank: int
    size: int

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part[None].repeat(self.size, *(1 for _ in part.shape))

    def add(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int,
        pending: Pending | None = None,
    ) -> bool:  # fmt: skip
        if DRY_RUN.get() and launches(h):
            # What the ranks will launch once they have met.
            exchange.request(h, bias, squares, self.rank, self.size)
        return add_gathered(self, h, parts.whole, bias)


def add_gathered(group: Group, h: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Add as `Group.add` does, through `gather`."""
    slices.add_launch(h, group.gather(part), bias)
    return False


class RankShare(NamedTuple):
    """Part number `index` of `count` equal parts."""

    index: int
    count: int

    def of(self, size: int) -> slice:
        """Return its place among `size` elements, a multiple of `count`."""
        part = size // self.count
        return slice(self.index * part, (self.index + 1) * part)


#: A share that is everything.
ALL = RankShare(0, 1)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks that compute one model together, in a group for each way of splitting it.

    tp: each rank holds a part of the heads and of the intermediate size of every layer of its stage.
    pp: each rank holds a stage, consecutive layers.
    world: all ranks; each holds a part of the vocabulary.
    experts: this rank's share of every layer's experts. The ranks of tp that have the same share are `of_expert`; each
    holds a part of the intermediate size of those experts.
    """

    tp: Group = field(default_factory=GroupOfOne)
    pp: Group = field(default_factory=GroupOfOne)
    world: Group = field(default_factory=GroupOfOne)
    experts: RankShare = ALL

    @property
    def of_expert(self) -> LoneRank:
        """The place among them, which exchange nothing on their own."""
        size = self.tp.size // self.experts.count
        return LoneRank(self.tp.rank % size, size)


class MeshSizes(NamedTuple):
    """The ways of splitting: ranks for each expert, shares of the experts, stages."""

    tensor: int = 1
    experts: int = 1
    stages: int = 1

    @property
    def of_stage(self) -> int:
        """The ranks of a stage, which are neighbours."""
        return self.tensor * self.experts


def mesh_of(rank: int, sizes: MeshSizes, group: Callable[[int, int], Group]) -> Mesh:
    """Return the mesh of a rank; `group(rank, size)` makes a group, one for all ways that have the same ranks."""
    num_ranks = sizes.of_stage * sizes.stages
    world = group(rank, num_ranks) if num_ranks > 1 else GroupOfOne()

    def part(place: int, size: int) -> Group:
        return world if size == num_ranks else group(place, size) if size > 1 else GroupOfOne()

    stage, place = divmod(rank, sizes.of_stage)
    experts = RankShare(place // sizes.tensor, sizes.experts)
    return Mesh(part(place, sizes.of_stage), part(stage, sizes.stages), world, experts)


def share_of(group: Group, most: int) -> RankShare:
    """Return this rank's share of something that can be cut into `most` parts; neighbours share one where it is few."""
    count = min(group.size, most)
    return RankShare(group.rank * count // group.size, count)


def can_share(group: Group, most: int) -> bool:
    """Return whether every rank gets equally many of `most` parts, or all parts are with equally many ranks."""
    return most % group.size == 0 or group.size % most == 0
