"""The weights of all experts of a layer, one above the other, as products of many experts take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Stack(NamedTuple):
    """One weight of E experts: [E, N, K]."""

    values: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def at(self, number: int) -> Any:
        """Return the weight of one expert, a view."""
        return self.values[number]


class Stacks(NamedTuple):
    """The weights of E experts: gate_up [E, 2 · I, H], gate first; down [E, H, I]."""

    gate_up: Stack
    down: Stack


def stacked(weights: Sequence[Any]) -> Stack | None:
    """Return the weights in one piece of memory; None where products of many experts do not take this format."""
    if not all(isinstance(weight, torch.Tensor) for weight in weights):
        return None
    return Stack(torch.stack(list(weights)))
