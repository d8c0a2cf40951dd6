"""Sampling at the end of a step: the hidden states of the rows that yield become ids.

The level is chosen per batch by what its rows ask for, with the same logits and the same noise, so that a neighbour's
top_k never changes your token. Sampling is by the Gumbel-max trick: the argmax of logits / temperature + noise is a
sample of the softmax (Gumbel 1954; Maddison, Tarlow and Minka 2014).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.sampling.sample import SamplingMetadata
from photon_grpc.runner.slot_table import SlotTable


class SamplingLevel(IntEnum):
    """The work of a tail; the last two levels add log-probabilities to PLAIN and PROCESSED_FILTERED."""

    #: An argmax, or noise over everything.
    PLAIN = 0
    #: PLAIN, and top_k, top_p, min_p.
    FILTERED = 1
    #: PLAIN, and biases, penalties, bans, limits and masks.
    PROCESSED = 2
    #: All of them.
    PROCESSED_FILTERED = 3
    PLAIN_LOGPROBS = 4
    LOGPROBS = 5

    @property
    def has_logprobs(self) -> bool:
        return self >= SamplingLevel.PLAIN_LOGPROBS

    @property
    def without_logprobs(self) -> SamplingLevel:
        """The level at which ids are sampled."""
        plain = {
            SamplingLevel.PLAIN_LOGPROBS: SamplingLevel.PLAIN,
            SamplingLevel.LOGPROBS: SamplingLevel.PROCESSED_FILTERED,
        }
        return plain.get(self, self)

    @property
    def is_processed(self) -> bool:
        return self.without_logprobs in (SamplingLevel.PROCESSED, SamplingLevel.PROCESSED_FILTERED)

    @property
    def is_filtered(self) -> bool:
        return self.without_logprobs in (SamplingLevel.FILTERED, SamplingLevel.PROCESSED_FILTERED)


class SampledTokens(NamedTuple):
    """Ids int64 [R], logprobs int32 [R, MAX_RECORDS, 3] as in `kernels/sampling/logprobs.py`, or None."""

    ids: torch.Tensor
    logprobs: torch.Tensor | None = None


class Head(Protocol):
    """A model's head, from its last hidden states to logits or ids; a Decoder."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits: [R, hidden_size] -> float32 [R, V]."""

    def sample(self, hidden: torch.Tensor, metadata: SamplingMetadata, /) -> torch.Tensor:
        """Return int64 [R], `kernels.sample` of the same logits, which need not exist."""


class Sampler:
    """The sampler of one id for each row, with log-probabilities if the row asks for them.

    Args:
        head: makes logits, or samples from them.
        table: the parameters of every slot.
        kernels: process logits, sample, and compute log-probabilities.
        has_masks: whether masks hold for what is sampled.
    """

    def __init__(self, head: Head, table: SlotTable, kernels: Kernels, *, has_masks: bool = True) -> None:
        self._has_masks = has_masks
        self._head = head
        self._table = table
        self._process_logits = kernels.process_logits
        self._sample_all = kernels.sample
        self._sample_filtered = kernels.sample_filtered
        self._logprobs = kernels.logprobs
        # A device samples all rows of a plain step in one kernel. On a CPU noise for a large vocabulary costs
        # milliseconds a row.
        self._on_cpu = table.device.type == "cpu"

    def level(self, batch: Batch) -> SamplingLevel:
        """Return the lowest level that serves every yielding row."""
        table = self._table
        if not (batch.masked or table.filtered or table.processed or table.banned or table.logprob_params):
            return SamplingLevel.PLAIN
        slots = [slot for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields]
        level = self._sampling_level(slots, is_masked=bool(batch.masked))
        if table.logprob_params.keys().isdisjoint(slots):
            return level
        return SamplingLevel.PLAIN_LOGPROBS if level is SamplingLevel.PLAIN else SamplingLevel.LOGPROBS

    def draft_level(self, slots: list[int]) -> SamplingLevel:
        """Return the lowest level that serves drafts of these slots."""
        return self._sampling_level(slots, is_masked=False)

    def _sampling_level(self, slots: list[int], *, is_masked: bool) -> SamplingLevel:
        table = self._table
        is_processed = is_masked or not (table.processed.isdisjoint(slots) and table.banned.keys().isdisjoint(slots))
        if table.filtered.isdisjoint(slots):
            return SamplingLevel.PROCESSED if is_processed else SamplingLevel.PLAIN
        return SamplingLevel.PROCESSED_FILTERED if is_processed else SamplingLevel.FILTERED

    def __call__(
        self, hidden: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, level: SamplingLevel
    ) -> SampledTokens:
        """Sample: NAN_LOGITS if a row's best logit is not finite, NOTHING_TO_SAMPLE if nothing is allowed.

        Args:
            hidden: [R, hidden_size], the model's last hidden states.
            slots: int64 [R].
            context_len: int32 or int64 [R], tokens before the one to sample.
        """
        of = self._table.numbers
        metadata = SamplingMetadata(slots, context_len, of.temperature, of.seed, of.output_index, of.num_prompt)
        if level is SamplingLevel.PLAIN and not self._on_cpu:
            return SampledTokens(self._head.sample(hidden, metadata))
        logits = self._head.logits(hidden)
        if not level.has_logprobs:
            return SampledTokens(self._sample(logits, metadata, level))
        # Log-probabilities are those of the model's logits, which processing changes.
        raw = logits.clone() if level.is_processed else logits
        ids = self._sample(logits, metadata, level)
        return SampledTokens(ids, self._logprobs(raw, ids, self._table.output_logprobs(slots)))

    def _sample(self, logits: torch.Tensor, metadata: SamplingMetadata, level: SamplingLevel) -> torch.Tensor:
        processing = self._table.processing if level.is_processed else None
        if processing is not None and not self._has_masks:
            processing = processing._replace(constraints=self._table.unmasked(processing.constraints))
        if not (level.is_filtered or self._on_cpu):
            return self._sample_all(logits, metadata, processing)
        is_constrained = None
        if processing is not None:
            is_constrained = self._process_logits(logits, metadata.slots, metadata.context_len, processing)
        filters = self._table.filters if level.is_filtered else None
        return self._sample_filtered(logits, metadata, filters, is_constrained)
