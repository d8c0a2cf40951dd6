"""The positions and pages of a step's tokens, handed down through every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from photon_grpc.kernels import GroupAttention


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The pages that the layers of one KVGroup write to and attend over in one step of T tokens."""

    #: [num_blocks, layers, 2, Hkv, block_size, D] in the model's dtype; the layers of a group in order.
    pages: torch.Tensor
    #: [T] int64: block · block_size + offset, where each token's key and value go.
    slot_mapping: torch.Tensor
    #: Writes and attends for every layer of the group.
    attention: GroupAttention


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step of T tokens over the paged KV cache."""

    #: [T] int64: each token's position in its sequence.
    positions: torch.Tensor
    #: One per KVGroup, in the order of the KVPlan.
    kv: tuple[GroupContext, ...]
    #: Results of the first layer that the others use again, by their maker. Cleared when the last layer is done.
    memo: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
