"""Owners of weights: created on the meta device, allocated one at a time while they are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple, Protocol

import torch

#: Dtypes of unquantized tensors, as safetensors spells them.
FLOATS = ("F32", "BF16", "F16", "F64")


class Part(NamedTuple):
    """The part `slices` of a tensor of shape `whole`; a number is one of a stack."""

    slices: tuple[slice | int, ...]
    whole: tuple[int, ...]


class Target(NamedTuple):
    """The destination of one tensor of a checkpoint, or of a part of one."""

    #: As the checkpoint names it, such as "model.layers.0.self_attn.q_proj.weight".
    name: str
    #: The place in the leaf's memory, in the tensor's or its part's shape; a slice where weights are merged.
    tensor: torch.Tensor
    #: The mean of random weights: 1 for a norm, else 0.
    center: float = 0.0
    #: None: all of the checkpoint's tensor.
    part: Part | None = None
    #: Those that the checkpoint's tensor may have.
    dtypes: tuple[str, ...] = FLOATS
    #: Whether a checkpoint may lack it: then the tensor keeps what it has.
    is_optional: bool = False
    #: Normal numbers of deviation 1 -> as many random values; None: normal numbers around `center`.
    random: Callable[[torch.Tensor], torch.Tensor] | None = None
    #: For each row here its number in the checkpoint's tensor; None: rows have one order.
    order: torch.Tensor | None = None
    #: Of what the file has here and of what was read: raise ModelLoadError for wrong values. None: none are wrong.
    check: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return tuple(self.tensor.shape) if self.part is None else self.part.whole

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the part of the checkpoint's tensor that this rank needs."""
        found = tensor.reshape(self.shape) if self.part is None else tensor[self.part.slices]
        return found if self.order is None else found[self.order]

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Return whether the checkpoint's tensor may have this shape; a single number has any number of dimensions."""
        return shape == self.shape or math.prod(shape) == math.prod(self.shape) == 1 == len(self.shape)


class ParameterOwner(Protocol):
    """An owner of weights."""

    @property
    def num_parameters(self) -> int:
        """The number of weights, however they are stored; 0 if another owner has them."""

    def allocate(self, device: torch.device) -> None:
        """Replace the meta tensors by uninitialised memory on `device`."""

    def targets(self) -> Iterator[Target]:
        """Return every tensor that must be filled; only names and shapes have a meaning before `allocate`."""

    def after_load(self) -> None:
        """Convert the weights to their final form, once all targets are filled."""


class OneWeight:
    """An owner of one tensor, `name` in the checkpoint, which keeps the form in which it is stored."""

    #: The mean of random weights.
    center: ClassVar[float] = 0.0

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = name
        self.weight = torch.empty(shape, dtype=dtype, device="meta")

    @property
    def num_parameters(self) -> int:
        return self.weight.numel()

    def allocate(self, device: torch.device) -> None:
        self.weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device=device)  # empty_like loads sympy

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight, center=self.center)

    def after_load(self) -> None:
        """Do nothing."""
