"""The base of all quantized formats: storage that comes from a Source, and its size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.parameter_owner import Target
from photon_grpc.layers.quantization.sources import Source


class Quantized(LinearMethod):
    """A format whose weights come from a Source; after loading, `linear.weight` is a tuple of its tensors."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def reads_floats(self) -> bool:
        return not self.source.form.layout

    def create(self, linear: Linear, device: torch.device) -> None:
        self.source.create(linear, device)

    def targets(self, linear: Linear) -> Iterator[Target]:
        """Return none once the weight is loaded, because its final form cannot be filled."""
        return iter(()) if isinstance(linear.weight, tuple) else self.source.targets(linear)

    def num_bytes(self, linear: Linear) -> int:
        tensors = (linear.bias, *linear.weight)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
