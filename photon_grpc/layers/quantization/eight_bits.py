"""Weights of 8 bits that are multiplied by activations of 8 bits: `kernels/linear/products8.py` has the formula.

Activations are quantized per token, or with blocks per token and 128 columns, at any number of rows.
"""

from __future__ import annotations

from functools import partial

import torch

from photon_grpc.kernels.linear import products8
from photon_grpc.kernels.linear.products8 import Weight8
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import Epilogue, Gemm
from photon_grpc.layers.linear import Folded, Linear
from photon_grpc.layers.operands import EightBitOperands
from photon_grpc.layers.quantization.quantized import Quantized


class EightBits(Quantized):
    """A format whose `linear.weight` is a Weight8."""

    def after_load(self, linear: Linear) -> None:
        values, scales, _ = self.source.codes(linear)
        linear.weight = Weight8(values, scales)

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
