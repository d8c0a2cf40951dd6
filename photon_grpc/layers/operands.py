"""A weight and a bias as products take them: by kernels of ours and by the matrix library, with the same bits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from photon_grpc.kernels.linear import fused8, fused_linear, products8, slices
from photon_grpc.kernels.linear.fused8 import Linear8
from photon_grpc.kernels.linear.fused_linear import Affine
from photon_grpc.kernels.linear.products8 import Weight8
from photon_grpc.kernels.linear.weight import QuantizedWeight, dequantize


class Operands(Protocol):
    """The map x -> W x + b.

    launchers: the file with the kernels that multiply and end a product: qkv_launch, swiglu_launch, add_launch.
    """

    launchers: Any

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def map(self) -> Any:
        """The map as `launchers` take it."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ [T, N] in x's dtype, or the float32 sums [slices, T, N] of several slices of K."""

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> None:
        """Add x Wᵀ + b to h: round(round(x Wᵀ) + round(h + b))."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ in float32, not rounded first."""


class DenseOperands(NamedTuple):
    """W [N, K] in the dtype of x; the sum over K is cut into `num_slices` (kernels/linear/cut.py)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    num_slices: int

    launchers = fused_linear

    @property
    def map(self) -> Affine:
        return Affine(self.weight, self.bias, self.num_slices)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_slices > 1:
            return slices.products(x, self.weight, self.num_slices)
        return x @ self.weight.t()

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> None:
        if self.num_slices > 1:
            return slices.add_launch(h, slices.products(x, self.weight, self.num_slices), self.bias)
        if self.bias is not None:
            h.add_(self.bias)
        h.addmm_(x, self.weight.t())
        return None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_slices > 1:
            return functools.reduce(torch.add, slices.products(x, self.weight, self.num_slices))
        if x.is_cuda and x.dtype != torch.float32:
            # The sums are float32 in the multiplier: they are not rounded on the way out.
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return F.linear(x, self.weight).float()


class PackedOperands(NamedTuple):
    """W in 8 or 4 bits, multiplied in the dtype of x; the library multiplies a scratch of the whole weight."""

    weight: QuantizedWeight
    bias: torch.Tensor | None
    num_slices: int

    launchers = fused_linear

    @property
    def map(self) -> Affine:
        return Affine(self.weight, self.bias, self.num_slices)

    def dense(self) -> DenseOperands:
        return DenseOperands(dequantize(self.weight, self.weight.scales.dtype), self.bias, self.num_slices)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense().product(x)

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> None:
        self.dense().add_to(h, x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense().logits(x)


class EightBitOperands(NamedTuple):
    """W in 8 bits, multiplied by x in 8 bits (kernels/linear/products8.py)."""

    weight: Weight8
    bias: torch.Tensor | None

    launchers = fused8

    @property
    def map(self) -> Linear8:
        return Linear8(self.weight, self.bias)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return products8.product(x, self.weight, torch.float32 if x.dtype == torch.float16 else x.dtype)

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> None:
        if self.bias is not None:
            h.add_(self.bias)
        h.add_(products8.product(x, self.weight, h.dtype))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return products8.product(x, self.weight, torch.float32)
