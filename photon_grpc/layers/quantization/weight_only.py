"""Weights of 8 or of 4 bits that are multiplied in the dtype of the activations.

    y = x Wᵀ + b,  W as in `kernels/linear/weight.py`

A product has the bits of a product with the dequantized weight in 16 bits, K cut as `cut.py` cuts packed weights. Where
the norm stays beside a weight, fused products multiply round(W · g), g the norm's weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional as F

from photon_grpc.kernels.linear import cut
from photon_grpc.kernels.linear.decode import WORD_COLUMNS, arrange, holds
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind, dequantize
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import Epilogue, Gemm, Logits
from photon_grpc.layers.linear import Folded, Linear
from photon_grpc.layers.operands import PackedOperands
from photon_grpc.layers.parameter_owner import Target
from photon_grpc.layers.prepacked_quantized import pack_quantized
from photon_grpc.layers.quantization.quantized import Quantized
from photon_grpc.layers.unquantized import tile_of


class WeightOnly(Quantized):
    """A format whose `linear.weight` is a QuantizedWeight.

    On CUDA its columns are arranged for kernels; on a CPU it is packed where that is supported.
    """

    def after_load(self, linear: Linear) -> None:
        # A head that is tied to a quantized embedding has its weight already.
        if not isinstance(linear.weight, QuantizedWeight):
            linear.weight = self._held(linear)
        self.pack(linear)

    def _held(self, linear: Linear) -> QuantizedWeight:
        values, scales, zeros = self.source.codes(linear)
        form = self.source.form
        kind = WeightKind(form.bits, form.block[1], zeros is not None)
        is_arranged = values.is_cuda and linear.in_features % WORD_COLUMNS[form.bits] == 0 and holds(scales)
        held = arrange(values, form.bits) if is_arranged else values
        return QuantizedWeight(held, scales, zeros, kind=kind, is_arranged=is_arranged)

    def pack(self, linear: Linear) -> None:
        """Replace the weight by one that is packed for this CPU, where that is supported."""
        packed = pack_quantized(linear.weight, linear.bias)
        if packed is not None:
            linear.method = PackedWeightOnly(self.source)
            linear.weight = packed  # drops the tensors

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        return F.linear(x, dequantize(linear.weight, linear.dtype), linear.bias)

    def fold(self, linear: Linear) -> Folded:
        return Folded.NO if linear.norm is None else self.source.folded

    def num_slices(self, linear: Linear) -> int:
        return cut.num_slices(linear.out_features, linear.in_features, bits=self.source.form.bits)

    def gemm(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        weight = self.fused_weight(linear)
        if weight.values.is_cuda and linear.dtype.itemsize > 2:
            # No kernel multiplies packed weights by rows of 32 bits.
            return None
        operands = PackedOperands(weight, linear.bias, linear.num_slices)
        if weight.is_arranged and (tile := tile_of(linear, num_rows, epilogue, weight.values.device, weight.kind)):
            return partial(epilogue.tiled, operands, tile)
        return partial(epilogue.library, operands) if epilogue.library_takes(linear.dtype) else None

    def fused_weight(self, linear: Linear) -> QuantizedWeight:
        """Return the weight of fused products, with the norm that stays beside it."""
        weight: QuantizedWeight = linear.weight
        if linear.norm is None or self.source.folded is not Folded.BESIDE:
            return weight
        return weight._replace(norm=linear.norm.weight, kind=weight.kind._replace(HAS_NORM=True))


class PackedWeightOnly(WeightOnly):
    """A format with W packed for this CPU, which cannot be read back; WeightOnly becomes this after loading."""

    def targets(self, linear: Linear) -> Iterator[Target]:
        return iter(())

    def num_bytes(self, linear: Linear) -> int:
        num_bytes: int = linear.weight.num_bytes
        return num_bytes

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        y: torch.Tensor = linear.weight(x)
        return y

    def fold(self, linear: Linear) -> Folded:
        return Folded.NO

    def gemm(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        logits: Gemm = linear.weight.logits
        return logits if isinstance(epilogue, Logits) else None
