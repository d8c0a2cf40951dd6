"""The draw at the end of a step: the hidden states of the rows that yield become ids.

The level is chosen per batch by what its rows ask for, with the same logits and the same noise, so that a neighbour's
top_k never changes your token. Drawing is by the Gumbel-max trick: the argmax of logits / temperature + noise is a
sample of the softmax (Gumbel 1954; Maddison, Tarlow and Minka 2014).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch

from photon_grpc.core.batch import NOTHING_TO_DRAW, Batch
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.sampling.draw import SamplingMetadata
from photon_grpc.runner.slot_table import SlotTable


class SamplingLevel(IntEnum):
    """Asked of a tail by the rows of a batch; each level does what the ones before it do."""

    #: An argmax, or noise over everything.
    PLAIN = 0
    #: top_k, top_p, min_p.
    FILTERED = 1
    #: Bans and masks.
    SHAPED = 2


class Head(Protocol):
    """Turns a model's last hidden states into logits or ids; a Decoder."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> float32 [R, V]."""

    def draw(self, hidden: torch.Tensor, metadata: SamplingMetadata, /) -> torch.Tensor:
        """int64 [R]; `kernels.draw` of the same logits, which need not exist."""


class Sampler:
    """Draws one id for each row.

    Args:
        head: makes logits, or draws from them.
        table: the parameters of every slot.
        kernels: masks, and draws from what filters keep.
    """

    def __init__(self, head: Head, table: SlotTable, kernels: Kernels) -> None:
        self._head = head
        self._table = table
        self._mask_logits = kernels.mask_logits
        self._draw_kept = kernels.draw_kept
        # A device draws all rows of a plain step in one kernel. On a CPU noise for a large vocabulary costs
        # milliseconds a row.
        self._on_cpu = table.device.type == "cpu"

    def level(self, batch: Batch) -> SamplingLevel:
        """The lowest that gives every yielding row what it asks for."""
        table = self._table
        if batch.masked:
            return SamplingLevel.SHAPED
        if not (table.filtered or table.banned):
            return SamplingLevel.PLAIN
        slots = [slot for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields]
        if not table.banned.keys().isdisjoint(slots):
            return SamplingLevel.SHAPED
        return SamplingLevel.PLAIN if table.filtered.isdisjoint(slots) else SamplingLevel.FILTERED

    def __call__(
        self, hidden: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, level: SamplingLevel
    ) -> torch.Tensor:
        """int64 [R]; NAN_LOGITS where the best logit is not finite, NOTHING_TO_DRAW where bans and masks are why.

        Args:
            hidden: [R, hidden_size], the model's last hidden states.
            slots: int64 [R].
            context_len: int32 or int64 [R], tokens before the one to draw.
        """
        table = self._table
        metadata = SamplingMetadata(
            slots, context_len, table.temperature, table.seed, table.output_index, table.num_prompt
        )
        if level is SamplingLevel.PLAIN and not self._on_cpu:
            return self._head.draw(hidden, metadata)
        logits = self._head.logits(hidden)
        is_constrained = None
        if level is SamplingLevel.SHAPED:
            is_constrained = self._mask_logits(logits, slots, context_len, table.constraints)
        ids, best = self._draw_kept(logits, metadata, None if level is SamplingLevel.PLAIN else table.filters)
        if is_constrained is None:
            return ids
        return torch.where(is_constrained & (best == -torch.inf), NOTHING_TO_DRAW, ids)
