"""The end of a step: the hidden states of the rows that yield become ids.

Three widths, chosen per batch by what its rows ask for, with the same logits and the same noise, so that a neighbour's top_k never changes
your token: an argmax; noise over everything; noise over what the filters kept. Drawing is by the Gumbel-max trick: the argmax of
logits / temperature + noise is a sample of the softmax (Gumbel 1954; Maddison, Tarlow and Minka 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch

from photon_grpc.kernels import Kernels
from photon_grpc.kernels.sampling.draw import INVALID, MIN_TEMPERATURE, SamplingMetadata
from photon_grpc.kernels.sampling.noise import MAX_GUMBEL, MIN_GUMBEL
from photon_grpc.runner.slot_table import SlotTable


class SamplingLevel(IntEnum):
    """How much the rows of a batch ask of the tail; each does what the ones before it do."""

    GREEDY = 0
    NOISE = 1
    #: Bans, then filters.
    FILTERED = 2


class Head(Protocol):
    """What a model's last hidden states are turned into; a Decoder."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> float32 [R, V]."""

    def draw(self, hidden: torch.Tensor, chances: SamplingMetadata) -> torch.Tensor:
        """int64 [R]; `kernels.draw` of the same logits, which need not exist."""


class Sampler:
    """Draws one id for each row.

    Args:
        head: makes logits, or draws from them.
        table: the parameters of every slot.
        kernels: noise, and what filters keep.
    """

    def __init__(self, head: Head, table: SlotTable, kernels: Kernels) -> None:
        self._head = head
        self._table = table
        self._noise = kernels.gumbel_noise
        self._topk_topp = kernels.topk_topp
        # On a device one kernel over all logits, with noise or without; on a CPU noise for what can win only.
        self._on_cpu = table.device.type == "cpu"
        self._narrowest = SamplingLevel.GREEDY if self._on_cpu else SamplingLevel.NOISE

    @property
    def widths(self) -> tuple[SamplingLevel, ...]:
        """All that `width` may answer."""
        return tuple(width for width in SamplingLevel if width >= self._narrowest)

    def width(self, slots: Sequence[int]) -> SamplingLevel:
        """What these slots need."""
        table = self._table
        if not table.filtered.isdisjoint(slots) or not table.banned.keys().isdisjoint(slots):
            return SamplingLevel.FILTERED
        return self._narrowest if table.drawing.isdisjoint(slots) else SamplingLevel.NOISE

    def __call__(
        self, hidden: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, width: SamplingLevel
    ) -> torch.Tensor:
        """int64 [R], INVALID where the logits are not finite.

        Args:
            hidden: [R, hidden_size], the model's last hidden states.
            slots: int64 [R].
            context_len: int32 or int64 [R], tokens before the one to draw.
        """
        draw = self._draw_and_check if self._on_cpu or width is SamplingLevel.FILTERED else self._draw_in_one
        return draw(hidden, slots, context_len, width)

    def _draw_in_one(
        self, hidden: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, width: SamplingLevel
    ) -> torch.Tensor:
        table = self._table
        rows = slots, context_len
        return self._head.draw(
            hidden, SamplingMetadata(*rows, table.temperature, table.seed, table.output_index, table.num_prompt)
        )

    def _draw_and_check(
        self, hidden: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, width: SamplingLevel
    ) -> torch.Tensor:
        logits = self._head.logits(hidden)
        if width is SamplingLevel.FILTERED:
            # Below min_tokens the ids that would end the output cannot be drawn.
            early = context_len < self._table.min_length[slots]
            logits.masked_fill_(self._table.banned_ids[slots] & early[:, None], -torch.inf)
        best, ids = logits.max(-1)
        if width is not SamplingLevel.GREEDY:
            ids = self._sample(logits, slots, context_len, ids, width)
        return torch.where(best.isfinite(), ids, INVALID)

    def _sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        context_len: torch.Tensor,
        greedy: torch.Tensor,
        width: SamplingLevel,
    ) -> torch.Tensor:
        table = self._table
        temperature = table.temperature[slots]
        is_greedy = temperature < MIN_TEMPERATURE
        scaled = logits.div_(torch.where(is_greedy, 1.0, temperature)[:, None])
        # A token this far below the best cannot win, whatever the noise.
        smallest = scaled.amax(-1) - (MAX_GUMBEL - MIN_GUMBEL)
        if width is SamplingLevel.FILTERED:
            kept = self._topk_topp(scaled, table.top_k[slots], table.top_p[slots], table.min_p[slots])
            smallest = torch.maximum(smallest, kept)
        position = context_len - table.num_prompt[slots]
        draw = self._draw_kept if self._on_cpu else self._draw_all
        drawn = draw(scaled, smallest, table.seed[slots], position, table.output_index[slots])
        return torch.where(is_greedy, greedy, drawn)

    def _draw_all(
        self,
        scaled: torch.Tensor,
        smallest: torch.Tensor,
        seed: torch.Tensor,
        position: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        noise = self._noise(seed, position, index, scaled.shape[1])
        return noise.add_(scaled).masked_fill_(scaled < smallest[:, None], -torch.inf).argmax(-1)

    def _draw_kept(
        self,
        scaled: torch.Tensor,
        smallest: torch.Tensor,
        seed: torch.Tensor,
        position: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """The same, with noise for the kept tokens only: on a CPU noise for a large vocabulary costs milliseconds a row."""
        drawn = []
        for row in range(scaled.shape[0]):
            kept = (scaled[row] >= smallest[row]).nonzero().view(1, -1)
            one = slice(row, row + 1)
            noise = self._noise(seed[one], position[one], index[one], kept)
            drawn.append(kept[0, (noise[0] + scaled[row, kept[0]]).argmax()] if kept.numel() else kept.new_zeros(()))
        return torch.stack(drawn)
