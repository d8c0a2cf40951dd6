"""The positions and pages of a step's tokens, passed to every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from photon_grpc.kernels import GroupAttention


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The pages that layers of one KVGroup write to and attend over in one step of T tokens.

    The layers have one section and one AttentionSpec.
    """

    #: [num_blocks, layers, 2, Hkv, block_size, D]; the layers of a section in order.
    pages: torch.Tensor
    #: [T] int64: block · block_size + offset, where each token's key and value go.
    slot_mapping: torch.Tensor
    #: Writes and attends for every one of the layers.
    attention: GroupAttention


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step of T tokens over the paged KV cache."""

    #: [T] int64: each token's position in its sequence.
    positions: torch.Tensor
    #: One for each of the decoder's `places`.
    kv: tuple[GroupContext, ...]
    #: The sequences that they are of, padding included; 0: not known.
    num_rows: int = 0
    #: int32 [1], on the device: tokens from this number on are padding and reach no expert. None: there are none.
    num_real: torch.Tensor | None = None
    #: Results of the first layer that the others use again, by their maker. Cleared when the last layer is done.
    memo: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
