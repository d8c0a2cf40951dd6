"""A decoder without the layers that launch the same kernels as another one."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from photon_grpc.layers.context import StepContext
from photon_grpc.layers.parameter_owner import ParameterOwner
from photon_grpc.models.decoder import Decoder, DecoderLayer


class PassedOver(DecoderLayer):
    """A layer that computes nothing.

    Args:
        layer: the one in whose place it is.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        self.attention = layer.attention

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x, residual

    def leaves(self) -> Iterator[ParameterOwner]:
        return iter(())


def one_layer_of_each_kind(decoder: Decoder) -> Decoder:
    """Return the decoder with layers passed over that launch the same kernels as an earlier one.

    The cache keeps its shape, and an observer sees every layer.
    """
    short = copy.copy(decoder)
    computing = (layer for layer in reversed(decoder.layers) if not isinstance(layer, PassedOver))
    kept = set({_kind(layer): layer for layer in computing}.values())
    short.layers = tuple(layer if layer in kept else PassedOver(layer) for layer in decoder.layers)
    return short


def _kind(layer: DecoderLayer) -> tuple[Hashable, ...]:
    """Return the form, the place of its keys, and types, shapes and numbers of everything that owns weights.

    Strings are left out: they are only names of weights.
    """
    traits = ((type(leaf), *map(_trait, vars(leaf).values())) for leaf in layer.leaves())
    return layer.form, layer.attention.place, *traits


def _trait(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, *value.shape
    return value if isinstance(value, int | float) else type(value)
