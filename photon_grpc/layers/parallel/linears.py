"""Linears of which every rank has a part: columns of y, or partial sums of all of y."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from photon_grpc.kernels import norm_add
from photon_grpc.kernels.norm_add import Norm
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import AddNormed, AddResidual, Epilogue, Gemm, Logits, PartialSums
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.parallel.group import Group, RankShare, share_of
from photon_grpc.layers.parameter_owner import Part, Target
from photon_grpc.layers.workspace import Workspace

#: The ends that leave sums as they are, in float32: without a workspace, and with one.
SUMS, PARTIAL = Logits(), PartialSums()


class ColumnParallelLinear(Linear):
    """A Linear of which every rank has an equal part of each output's features, the columns of y.

    Sizes and `options` are those of a Linear of the whole model.

    Args:
        most: the parts that an output can be cut into, where there may be fewer than ranks; ranks then share them.
    """

    def __init__(
        self, prefix: str, in_features: int, outputs: Mapping[str, int], *, group: Group,
        most: Mapping[str, int] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.group = group
        self._shares = {prefix + name: share_of(group, (most or {}).get(name, group.size)) for name in outputs}
        sizes = {name: features // self._shares[prefix + name].count for name, features in outputs.items()}
        super().__init__(prefix, in_features, sizes, **options)

    def part(
        self, output: str, shape: tuple[int, ...], *, rows: int | None = 0, columns: int | None = 1
    ) -> Part | None:
        return None if rows is None else part_of(shape, rows, self._shares[output])


class MergedParallelLinear(Linear):
    """A ColumnParallelLinear whose `outputs` are one tensor in the checkpoint, `name`, one above the other."""

    def __init__(
        self, prefix: str, in_features: int, name: str, outputs: Mapping[str, int], *, group: Group,
        most: Mapping[str, int] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        own, begin = [], 0
        for output, features in outputs.items():
            rows = share_of(group, (most or {}).get(output, group.size)).of(features)
            own.append(torch.arange(begin + rows.start, begin + rows.stop))
            begin += features
        #: The numbers of the rows here, of so many.
        self._own, self._num_rows = torch.cat(own), begin
        super().__init__(prefix, in_features, {name: len(self._own)}, **options)

    def part(
        self, output: str, shape: tuple[int, ...], *, rows: int | None = 0, columns: int | None = 1
    ) -> Part | None:
        whole = tuple(self._num_rows if at == rows else size for at, size in enumerate(shape))
        return Part((slice(None),) * len(shape), whole)

    def targets(self) -> Iterator[Target]:
        return (target._replace(order=self._own) for target in super().targets())


class RowPartLinear(Linear):
    """A Linear of which every rank has an equal part of the input's features; y is this rank's part of the sum.

    Sizes and `options` are those of a Linear of the whole model.
    """

    def __init__(
        self, prefix: str, in_features: int, outputs: Mapping[str, int], *, group: Group, **options: Any
    ) -> None:
        self.group = group
        super().__init__(prefix, in_features // group.size, outputs, **options)

    def part(
        self, output: str, shape: tuple[int, ...], *, rows: int | None = 0, columns: int | None = 1
    ) -> Part | None:
        return None if columns is None else part_of(shape, columns, share_of(self.group, self.group.size))


class RowParallelLinear(RowPartLinear):
    """A RowPartLinear whose parts all ranks add.

        y = round(partial[0] + … + partial[size - 1]) + b       partial sums in float32, added in the order of ranks

    Sizes and `options` are those of a Linear of the whole model. All ranks have the bias.

    Args:
        site: 0 for the first of a layer's sums, 1 for the second.
    """

    def __init__(
        self, prefix: str, in_features: int, outputs: Mapping[str, int], *, group: Group, site: int = 0, **options: Any
    ) -> None:
        self._site = site
        #: Added once to the sum, not to a rank's part of it.
        self._bias: torch.Tensor | None = None
        self._sums: Gemm | None = None
        super().__init__(prefix, in_features, outputs, group=group, **options)

    def __call__(self, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        if self.group.size == 1:
            return super().__call__(x, ctx)
        sums = super().__call__(x, ctx).float() if self._sums is None else self._sums(x)
        y = in_order(self.group.gather(sums)).to(x.dtype)
        return y if self._bias is None else y.add_(self._bias)

    def gemm(self, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        """Return the product whose partial sums all ranks add to the residual stream; None for other ends."""
        if self.group.size == 1:
            return super().gemm(num_rows, epilogue)
        sums = super().gemm(num_rows, PARTIAL)
        if sums is None or not epilogue.library_takes(self.dtype):
            return None
        if isinstance(epilogue, AddNormed):
            return partial(self._add_normed, sums, epilogue.norm)
        return partial(self._add, sums) if isinstance(epilogue, AddResidual) else None

    def _add(self, sums: Gemm, work: Workspace, x: torch.Tensor) -> None:
        # What follows a layer's second sum reads all rows.
        pending = work.sums.pending if self._site == 0 else None
        if self.group.add(work.h, sums(work, x), self._bias, work.sums.partial, self._site, pending):
            work.written()
        else:
            work.outdated()

    def _add_normed(self, sums: Gemm, norm: Norm, work: Workspace, x: torch.Tensor) -> None:
        """Add the norm of the sum, which is rounded before it as a product of one rank is."""
        product = torch.zeros_like(work.h)
        self.group.add(product, sums(work, x), None, torch.empty_like(work.sums.partial), self._site)
        norm_add.launch(product, self._bias, norm, work.h, work.written())

    def after_load(self) -> None:
        if self.group.size > 1:
            self._bias, self.bias = self.bias, None
        super().after_load()
        if self.group.size > 1:
            self._sums = super().gemm(0, SUMS)


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first axis, added in its order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def part_of(shape: tuple[int, ...], axis: int, share: RankShare) -> Part | None:
    """Return the part that a tensor of `shape` is, split along `axis`; None if it is all."""
    if share.count == 1:
        return None
    whole = tuple(size * share.count if at == axis else size for at, size in enumerate(shape))
    slices = tuple(share.of(whole[axis]) if at == axis else slice(None) for at in range(len(shape)))
    return Part(slices, whole)
