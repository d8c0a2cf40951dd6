"""The sources of quantized weights: a float checkpoint, quantized while it is read, and a quantized one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from photon_grpc.config.quantization import WeightFormat
from photon_grpc.layers.linear import Folded, Linear
from photon_grpc.layers.parameter_owner import Target
from photon_grpc.layers.quantization.layouts import LAYOUTS
from photon_grpc.layers.quantization.rounding import quantized
from photon_grpc.layers.quantization.stored import Codes, Stored, WeightSizes, check_sizes, joined, target_of
from photon_grpc.layers.unquantized import Unquantized


class Source(Protocol):
    """Where the weight of a Linear comes from; until `codes`, `linear.weight` is what is read."""

    form: WeightFormat

    @property
    def folded(self) -> Folded:
        """Where the weight of the norm before a Linear is once the weight is loaded."""

    def create(self, linear: Linear, device: torch.device) -> None:
        """Allocate what is read, and the bias. Raise ModelLoadError if the sizes do not suit the format."""

    def targets(self, linear: Linear) -> Iterator[Target]:
        """Return the places of the checkpoint's tensors."""

    def codes(self, linear: Linear) -> Codes:
        """Return the weight in its canonical form. Raise ModelLoadError for wrong values."""


@dataclass(frozen=True, slots=True)
class FromFloat:
    """A float checkpoint: the norm before a weight is multiplied into it, then it is rounded."""

    form: WeightFormat
    floats = Unquantized()
    folded = Folded.INTO_WEIGHT

    def create(self, linear: Linear, device: torch.device) -> None:
        for name, shape in _shapes(linear, self.form):
            check_sizes(name, shape, is_merged=len(linear.outputs) > 1)
        self.floats.create(linear, device)

    def targets(self, linear: Linear) -> Iterator[Target]:
        return self.floats.targets(linear)

    def codes(self, linear: Linear) -> Codes:
        self.floats.fold(linear)
        return quantized(linear.slices(), linear.weight, self.form, scale_dtype(linear, self.form))


@dataclass(frozen=True, slots=True)
class Staged:
    """The tensors of one output as the checkpoint stores them, by suffix."""

    name: str
    shape: WeightSizes
    stored: tuple[Stored, ...]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """A quantized checkpoint: the norm stays beside its weights."""

    form: WeightFormat
    folded = Folded.BESIDE

    def create(self, linear: Linear, device: torch.device) -> None:
        linear.weight = [self._staged(linear, name, shape, device) for name, shape in _shapes(linear, self.form)]
        linear.bias = torch.empty(linear.out_features, dtype=linear.dtype, device=device) if linear.has_bias else None

    def _staged(self, linear: Linear, name: str, shape: WeightSizes, device: torch.device) -> Staged:
        check_sizes(name, shape, is_merged=len(linear.outputs) > 1)
        stored = LAYOUTS[self.form.layout].stored(shape)
        tensors = {one.suffix: torch.empty(one.shape, dtype=one.dtype, device=device) for one in stored}
        for one in stored:
            if one.default is not None:
                tensors[one.suffix].copy_(one.default)
        return Staged(name, shape, stored, tensors)

    def targets(self, linear: Linear) -> Iterator[Target]:
        for staged, (name, rows) in zip(linear.weight, linear.slices(), strict=True):
            for stored in staged.stored:
                tensor = staged.tensors[stored.suffix]
                part = linear.part(name, tensor.shape, rows=stored.rows, columns=stored.columns)
                yield target_of(name, stored, tensor, part, staged.shape)
            if linear.bias is not None:
                bias = linear.bias[rows]
                yield Target(name + ".bias", bias, part=linear.part(name, bias.shape, columns=None))

    def codes(self, linear: Linear) -> Codes:
        read = LAYOUTS[self.form.layout].read
        parts = []
        while linear.weight:
            # Not kept: what was read is freed output by output.
            staged = linear.weight.pop(0)
            parts.append(read(staged.name, staged.tensors, staged.shape))
        return joined(parts)


def scale_dtype(linear: Linear, form: WeightFormat) -> torch.dtype:
    """Return the dtype of scales: that in which they are multiplied."""
    return torch.float32 if form.activation_bits == 8 else linear.dtype


def _shapes(linear: Linear, form: WeightFormat) -> Iterator[tuple[str, WeightSizes]]:
    """Return the name and the sizes of every output's weight."""
    for name, rows in linear.slices():
        sizes = rows.stop - rows.start, linear.in_features
        part = linear.part(name, sizes)
        whole, begin = (sizes, 0) if part is None else (part.whole, part.slices[1].start or 0)
        yield name, WeightSizes(*sizes, form, scale_dtype(linear, form), (whole[0], whole[1]), begin)
