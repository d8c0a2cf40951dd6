"""The weights of all experts of a layer, one above the other, as products of many experts take them.

A stack has any of the forms that one weight has: 16 or 32 bits; packed 8 or 4 bits with scales and zeros, multiplied in
the dtype of the activations (`linear/weight.py`); 8 bits that are multiplied by activations of 8 bits
(`linear/products8.py`). Columns of packed weights lie in their natural order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.linear.decode import natural
from photon_grpc.kernels.linear.products8 import Weight8
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind, dequantize


class Stack(NamedTuple):
    """One weight of E experts: values [E, N, K], or [E, N, K / 2] of 4 bits.

    scales, zeros: [E, groups, N]; of blocks scales [E, K / 128, N / 128]. kind: of a weight that is decoded. is_eight:
    whether activations have 8 bits, too.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    kind: WeightKind = WeightKind()
    is_eight: bool = False

    @property
    def shape(self) -> torch.Size:
        """Return (E, N, K) as torch.Size."""
        experts, rows, width = self.values.shape
        return torch.Size((experts, rows, width * 2 if self.kind.BITS == 4 else width))

    @property
    def has_blocks(self) -> bool:
        """Whether each 128 x 128 of W has a scale."""
        return self.is_eight and self.scales is not None and self.scales.shape[2] != self.values.shape[1]

    def at(self, number: int) -> Any:
        """Return the weight of one expert as a Linear has it, a view."""
        if self.scales is None:
            return self.values[number]
        if self.is_eight:
            return Weight8(self.values[number], self.scales[number])
        zeros = None if self.zeros is None else self.zeros[number]
        return QuantizedWeight(self.values[number], self.scales[number], zeros, kind=self.kind)

    def matrix(self, number: int) -> torch.Tensor:
        """Return the numbers of one expert's weight that is multiplied by activations of 16 or 32 bits: [N, K]."""
        weight = self.at(number)
        return dequantize(weight, weight.scales.dtype) if isinstance(weight, QuantizedWeight) else weight


class Stacks(NamedTuple):
    """The weights of E experts: gate_up [E, 2 · I, H], gate first; down [E, H, I]."""

    gate_up: Stack
    down: Stack


def stacked(weights: Sequence[Any]) -> Stack | None:
    """Return the weights in one piece of memory; None where they are in a form that no kernel reads."""
    first = weights[0]
    if isinstance(first, torch.Tensor):
        return Stack(torch.stack(list(weights)))
    if isinstance(first, Weight8):
        return Stack(_all(weights, "values"), _all(weights, "scales"), is_eight=True)
    if isinstance(first, QuantizedWeight):
        rows = [natural(each.values, each.kind.BITS) if each.is_arranged else each.values for each in weights]
        zeros = None if first.zeros is None else _all(weights, "zeros")
        return Stack(torch.stack(rows), _all(weights, "scales"), zeros, first.kind)
    return None


def _all(weights: Sequence[Any], name: str) -> torch.Tensor:
    return torch.stack([getattr(weight, name) for weight in weights])
