"""Parts that own weights: born on the meta device, given memory one at a time while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch


class Target(NamedTuple):
    """Where one tensor of a checkpoint goes."""

    #: As the checkpoint names it, such as "model.layers.0.self_attn.q_proj.weight".
    name: str
    #: The place in the leaf's memory: of the tensor's shape, a slice of a larger one where weights are merged.
    tensor: torch.Tensor
    #: Around what random weights are drawn: 1 for a norm, else 0.
    center: float = 0.0


class Leaf(Protocol):
    """One owner of weights."""

    def allocate(self, device: torch.device) -> None:
        """Replaces the meta tensors by uninitialised memory on `device`."""

    def targets(self) -> Iterator[Target]:
        """Every tensor that must be filled; only names and shapes mean something before `allocate`."""

    def after_load(self) -> None:
        """All targets are filled: brings the weights into the form that is computed with."""
