"""Parts that own weights: born on the meta device, given memory one at a time while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch


class Part(NamedTuple):
    """The part `slices` of a tensor of shape `whole`."""

    slices: tuple[slice, ...]
    whole: tuple[int, ...]


class Target(NamedTuple):
    """The place of one tensor of a checkpoint, or of a part of one."""

    #: As the checkpoint names it, such as "model.layers.0.self_attn.q_proj.weight".
    name: str
    #: The place in the leaf's memory, in the tensor's or its part's shape; a slice where weights are merged.
    tensor: torch.Tensor
    #: The mean of random weights: 1 for a norm, else 0.
    center: float = 0.0
    #: None: all of the checkpoint's tensor.
    part: Part | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return tuple(self.tensor.shape) if self.part is None else self.part.whole

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the part of the checkpoint's tensor that belongs here."""
        return tensor if self.part is None else tensor[self.part.slices]


class ParameterOwner(Protocol):
    """An owner of weights."""

    def allocate(self, device: torch.device) -> None:
        """Replace the meta tensors by uninitialised memory on `device`."""

    def targets(self) -> Iterator[Target]:
        """Return every tensor that must be filled; only names and shapes have a meaning before `allocate`."""

    def after_load(self) -> None:
        """Bring the weights into the form that is computed with, once all targets are filled."""
