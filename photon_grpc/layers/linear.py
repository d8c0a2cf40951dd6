"""y = x Wᵀ + b, several projections of the same input merged into one; how W is stored and multiplied is the QuantMethod's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from photon_grpc.layers.leaf import Target
from photon_grpc.layers.prepacked import Prepacked, can_prepack


class QuantMethod(Protocol):
    """How a Linear keeps its weights; it stores them as attributes of the Linear it is given."""

    def create(self, linear: Linear, device: torch.device) -> None:
        """Allocates the linear's tensors on `device`, "meta" included."""

    def targets(self, linear: Linear) -> Iterator[Target]:
        """Places for the checkpoint's tensors in them."""

    def after_load(self, linear: Linear) -> None:
        """May replace the tensors, and `linear.method` by one that computes with the new ones."""

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features] in x's dtype."""


class Linear:
    """Projections `outputs` (name -> features, in order) of one input: `prefix + name + ".weight"` is [features, in_features].

    Calling it maps [T, in_features] to [T, sum of features], the outputs side by side in their order.
    """

    def __init__(
        self,
        prefix: str,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        method: QuantMethod,
    ) -> None:
        self.prefix = prefix
        self.in_features = in_features
        self.outputs = dict(outputs)
        self.out_features = sum(outputs.values())
        self.has_bias = bias
        self.dtype = dtype
        self.method = method
        self.weight: Any = None
        self.bias: torch.Tensor | None = None
        self.allocate(torch.device("meta"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x)

    def allocate(self, device: torch.device) -> None:
        self.method.create(self, device)

    def targets(self) -> Iterator[Target]:
        return self.method.targets(self)

    def after_load(self) -> None:
        self.method.after_load(self)

    def slices(self) -> Iterator[tuple[str, slice]]:
        """Each output's name with its prefix, and its rows of the merged weight."""
        begin = 0
        for name, features in self.outputs.items():
            yield self.prefix + name, slice(begin, begin + features)
            begin += features


class Unquantized:
    """W [out_features, in_features] as it is; on a CPU it is packed after loading where that is supported."""

    def create(self, linear: Linear, device: torch.device) -> None:
        linear.weight = torch.empty(linear.out_features, linear.in_features, dtype=linear.dtype, device=device)
        linear.bias = torch.empty(linear.out_features, dtype=linear.dtype, device=device) if linear.has_bias else None

    def targets(self, linear: Linear) -> Iterator[Target]:
        for name, rows in linear.slices():
            yield Target(name + ".weight", linear.weight[rows])
            if linear.bias is not None:
                yield Target(name + ".bias", linear.bias[rows])

    def after_load(self, linear: Linear) -> None:
        if can_prepack(linear.weight):
            linear.method = PackedUnquantized()
            linear.weight = Prepacked(linear.weight, linear.bias)  # drops the row-major weight

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, linear.weight, linear.bias)


class PackedUnquantized(Unquantized):
    """W packed for this CPU; what Unquantized becomes there."""

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return linear.weight(x)
