"""y = x Wᵀ + b, several projections of one input merged; its LinearMethod stores W and multiplies by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Protocol

import torch

from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import Epilogue, Gemm
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parameter_owner import Part, Target


class Folded(Enum):
    """Where the weight of the norm before a fused product is applied."""

    #: The format has no such product.
    NO = 0
    #: In W; ones are left in the norm.
    INTO_WEIGHT = 1
    #: In the norm. The method's fused products multiply W by it; the norm stays for the products without.
    BESIDE = 2


class LinearMethod(Protocol):
    """The format of a Linear's weights and its products; the weights are attributes of the Linear it is given."""

    #: Whether the model rounds inputs of products to 8 bits, where a last bit of what comes before decides.
    rounds_inputs: bool = False

    @property
    def reads_floats(self) -> bool:
        """Whether a checkpoint, or a tied embedding, has the weight as one float tensor."""
        return True

    def create(self, linear: Linear, device: torch.device) -> None:
        """Allocate the linear's tensors on `device`, "meta" included."""

    def targets(self, linear: Linear) -> Iterator[Target]:
        """Return the places of the checkpoint's tensors."""

    def after_load(self, linear: Linear) -> None:
        """Replace the tensors, and `linear.method` by one that computes with the new ones, if that is faster."""

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        """Multiply [T, in_features] -> [T, out_features] in x's dtype. No ctx: outside the body of a step."""

    def num_bytes(self, linear: Linear) -> int:
        """Return the size of the loaded weights in bytes."""
        return linear.num_parameters * linear.dtype.itemsize

    def fold(self, linear: Linear) -> Folded:
        """Prepare fused products for the norm before this Linear, and return where the norm's weight is then."""
        return Folded.NO

    def num_slices(self, linear: Linear) -> int:
        """Return the number of contiguous slices of the sum over in_features, in every product of this weight."""
        return 1

    def gemm(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        """Return the product with its epilogue for a bucket of `num_rows` rows; 0: for any number.

        None means that this format has only `apply`.
        """
        return None


class Linear:
    """Projections `outputs` (name -> features, in order) of one input.

    `prefix + name + ".weight"` is [features, in_features]. A call maps [T, in_features] to [T, sum of features], the
    outputs side by side in their order. `norm` is the norm that the input comes from, if nothing else reads it.
    """

    def __init__(
        self,
        prefix: str,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        method: LinearMethod,
        norm: RMSNorm | None = None,
    ) -> None:
        self.prefix = prefix
        self.in_features = in_features
        self.outputs = dict(outputs)
        self.out_features = sum(outputs.values())
        self.has_bias = bias
        self.dtype = dtype
        self.method = method
        self.norm = norm
        self.weight: Any = None
        self.bias: torch.Tensor | None = None
        self.allocate(torch.device("meta"))

    def __call__(self, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        return self.method.apply(self, x, ctx)

    def gemm(self, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        """Return what LinearMethod.gemm returns."""
        return self.method.gemm(self, num_rows, epilogue)

    @property
    def num_slices(self) -> int:
        return self.method.num_slices(self)

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.has_bias)

    def part(
        self, output: str, shape: tuple[int, ...], *, rows: int | None = 0, columns: int | None = 1
    ) -> Part | None:
        """Return the part of a checkpoint's tensor that one of `shape` is here; None if all of it.

        `output` is a name of `slices`. `rows` and `columns` are the axes along which it has the rows and the columns
        of W, None if it has not.
        """
        return None

    def allocate(self, device: torch.device) -> None:
        self.method.create(self, device)

    def targets(self) -> Iterator[Target]:
        return self.method.targets(self)

    def after_load(self) -> None:
        self.method.after_load(self)

    def slices(self) -> Iterator[tuple[str, slice]]:
        """Return each output's name with its prefix, and its rows of the merged weight."""
        begin = 0
        for name, features in self.outputs.items():
            yield self.prefix + name, slice(begin, begin + features)
            begin += features
