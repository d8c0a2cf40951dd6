"""Weights of 8 bits that are multiplied by activations of 8 bits: `kernels/linear/products8.py` has the formula.

Activations are quantized per token, or with blocks per token and 128 columns, at any number of rows. On a CPU all other
sums of such a model, but those of its head, are taken in float64 and rounded once (docs/numerics.md says why).
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from photon_grpc.kernels.linear import products8
from photon_grpc.kernels.linear.products8 import Weight8
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import Epilogue, Gemm
from photon_grpc.layers.linear import Folded, Linear
from photon_grpc.layers.operands import EightBitOperands
from photon_grpc.layers.quantization.quantized import Quantized
from photon_grpc.layers.unquantized import Unquantized


class EightBits(Quantized):
    """A format whose `linear.weight` is a Weight8."""

    rounds_inputs = True

    def after_load(self, linear: Linear) -> None:
        linear.weight = Weight8(*self.source.codes(linear)[:2])

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        y = products8.product(x, linear.weight)
        return y if linear.bias is None else y.add_(linear.bias)

    def fold(self, linear: Linear) -> Folded:
        return Folded.NO if linear.norm is None else self.source.folded

    def gemm(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        operands = EightBitOperands(self.fused_weight(linear), linear.bias)
        is_wide = products8.is_wide(linear.weight, num_rows, linear.dtype)
        way = None if is_wide else products8.way_of(linear.weight, num_rows, epilogue.cost, epilogue.span)
        if way is not None and epilogue.cost != "head":
            return partial(epilogue.tiled, operands, way)
        # The product alone, at any number of rows, and a second kernel.
        return partial(epilogue.library, operands) if epilogue.library_takes(torch.bfloat16) else None

    def fused_weight(self, linear: Linear) -> Weight8:
        """Return the weight of fused products, with the norm that stays beside it."""
        weight: Weight8 = linear.weight
        if linear.norm is None or self.source.folded is not Folded.BESIDE:
            return weight
        return weight._replace(norm=linear.norm.weight)


class BesideEightBits(Unquantized):
    """The format of modules that a model of EightBits leaves unquantized, but for its head."""

    rounds_inputs = True

    def after_load(self, linear: Linear) -> None:
        """Leave the weight in rows."""

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        if x.is_cuda:
            return super().apply(linear, x, ctx)
        # So many weights stay in the cache of a core as float64.
        exact, parts = x.double(), linear.weight.split(max(1, (1 << 18) // linear.weight.shape[1]))
        y = torch.cat([F.linear(exact, part.double()) for part in parts], 1)
        return (y if linear.bias is None else y + linear.bias).to(x.dtype)
