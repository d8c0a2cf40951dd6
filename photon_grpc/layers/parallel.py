"""Linears split over several ranks. A group of one holds everything and adds nothing to the computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from photon_grpc.layers.context import StepContext
from photon_grpc.layers.ends import End, Gemm
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.parameter_owner import Part


class Group(Protocol):
    """Ranks 0 … size - 1 that compute the same step."""

    rank: int
    size: int

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `partial`, equal on all to the bit; may be `partial` itself."""


class GroupOfOne:
    """This process alone."""

    rank = 0
    size = 1

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks that compute one model together, in a group for each way of splitting it.

    tp: each rank holds a part of the heads and of the intermediate size of every layer.
    """

    tp: Group = field(default_factory=GroupOfOne)


class ColumnParallelLinear(Linear):
    """A Linear of which every rank has an equal part of each output's features, the columns of y.

    Sizes and `options` are those of a Linear of the whole model.
    """

    def __init__(
        self, prefix: str, in_features: int, outputs: Mapping[str, int], *, group: Group, **options: Any
    ) -> None:
        self.group = group
        shares = {name: features // group.size for name, features in outputs.items()}
        super().__init__(prefix, in_features, shares, **options)

    def part(self, shape: tuple[int, ...], *, rows: int | None = 0, columns: int | None = 1) -> Part | None:
        return None if rows is None else share_of(shape, rows, self.group)


class RowParallelLinear(Linear):
    """A Linear of which every rank has an equal part of the input's features; y is the sum over the ranks.

    Sizes and `options` are those of a Linear of the whole model.
    """

    def __init__(
        self, prefix: str, in_features: int, outputs: Mapping[str, int], *, group: Group, **options: Any
    ) -> None:
        self.group = group
        super().__init__(prefix, in_features // group.size, outputs, **options)

    def __call__(self, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        return self.group.all_reduce(super().__call__(x, ctx))

    def gemm(self, num_rows: int, end: End) -> Gemm | None:
        """Return None if there are several ranks: an epilogue of a partial sum would be wrong."""
        return super().gemm(num_rows, end) if self.group.size == 1 else None

    def part(self, shape: tuple[int, ...], *, rows: int | None = 0, columns: int | None = 1) -> Part | None:
        return None if columns is None else share_of(shape, columns, self.group)

    def after_load(self) -> None:
        """Clear the bias on all ranks but rank 0, so that it is added once."""
        if self.bias is not None and self.group.rank > 0:
            self.bias.zero_()
        super().after_load()


def share_of(shape: tuple[int, ...], axis: int, group: Group) -> Part | None:
    """Return this rank's part of `shape` of a tensor that is split along `axis`; None if it has all."""
    if group.size == 1:
        return None
    begin, size = group.rank * shape[axis], shape[axis]
    slices = tuple(slice(begin, begin + size) if at == axis else slice(None) for at in range(len(shape)))
    whole = tuple(size * group.size if at == axis else size for at, size in enumerate(shape))
    return Part(slices, whole)
