"""Weights of 8 and of 4 bits with activations of 16: what kernels take of them, and the numbers that they stand for.

    W = round((q - z) · s)             q - z is exact; z is 0 with 8 bits and 8 with 4 where there are no zeros
    W = round(round((q - z) · s) · g)  with the weight g of the norm before the product beside it

W is in the compute dtype, which is that of s: every kernel multiplies the bits that `dequantize` returns.

Shapes: q int8 [N, K], or uint8 [N, K / 2] with an even column in the low half of its byte; s and z [K / GROUP, N], or
[1, N] where a row has one scale; g [K].
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.linear.decode import natural, unpacked


class WeightKind(NamedTuple):
    """The constants of a weight: BITS a value, GROUP columns that share a scale (0: all columns of a row)."""

    BITS: int = 16
    GROUP: int = 0
    HAS_ZEROS: bool = False
    HAS_NORM: bool = False


#: A weight in the dtype of the activations.
PLAIN = WeightKind()


class QuantizedWeight(NamedTuple):
    """A weight of 8 or of 4 bits; is_arranged: whether `decode.arrange` moved its columns, as kernels take it."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    kind: WeightKind = WeightKind()
    is_arranged: bool = False

    @property
    def shape(self) -> torch.Size:
        """Return (N, K) as torch.Size."""
        rows, width = self.values.shape
        return torch.Size((rows, width * 8 // self.kind.BITS))

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self[:4] if each is not None)

    def part(self, rows: slice | torch.Tensor) -> QuantizedWeight:
        """Return some rows, as a slice or by their numbers."""
        zeros = None if self.zeros is None else self.zeros[:, rows]
        return self._replace(values=self.values[rows], scales=self.scales[:, rows], zeros=zeros)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return W [N, K] in torch, in natural order; dtype is that of the scales."""
    bits = weight.kind.BITS
    values = natural(weight.values, bits) if weight.is_arranged else weight.values
    numbers = (values if bits == 8 else unpacked(values)).to(dtype)
    rows, columns = numbers.shape
    groups = numbers.view(rows, weight.scales.shape[0], -1)
    if weight.zeros is not None:
        groups = groups - weight.zeros.t()[:, :, None]
    elif bits == 4:
        groups = groups - 8
    whole = (groups * weight.scales.t()[:, :, None]).view(rows, columns)
    return whole if weight.norm is None else whole * weight.norm
