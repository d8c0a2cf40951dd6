"""One step on tensors: a body, from the slot table to hidden rows, and a tail, which samples ids and stores them.

    hidden = step.body(rows, shape, bounds)
    sampled = step.tail(rows, hidden.last, level)

With drafts, which a drafter has written behind the known ids of their slots, a row may sample at several positions:

    states = step.verify(rows, draws, shape, bounds)
    sampled, lengths = step.accepting_tail(rows, draws, states, level)

`eager.py` calls both with the exact shape of a batch, `graphs.py` captures both in padded shapes and replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.core.kv import KVPlan
from photon_grpc.kernels import AttentionMetadata, Kernels
from photon_grpc.kernels.slot_state import Inputs, SlotState
from photon_grpc.layers.context import StepContext
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.logprob_records import NO_RECORDS, LogprobRecords, PromptLogprobRecorder
from photon_grpc.runner.sampler import SampledTokens, Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable


class StepShape(NamedTuple):
    """The shape of a body. In a decode step every row has one token, and no row is new.

    In a verify step every row is its last known id and drafts, all of which are sampled behind, and no row is new.
    """

    kind: Literal["decode", "mixed", "verify"]
    num_tokens: int
    num_rows: int

    @property
    def num_draws(self) -> int:
        """The positions that a tail samples at."""
        return self.num_tokens if self.kind == "verify" else self.num_rows


class Bounds(NamedTuple):
    """Bounds of the rows' lengths, known to the host, so that nothing waits for the device."""

    max_query_len: int
    min_query_len: int
    max_context_len: int


class Rows(NamedTuple):
    """The R rows of a step. A padding row has slot 0, computes nothing and yields nothing.

    slots, counts (tokens to compute), yields (1 where an id is sampled): int64 [R], of the host.
    context_len: int32 [R], tokens before the id to sample; filled by the body.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    yields: torch.Tensor
    context_len: torch.Tensor

    def first(self, num_rows: int) -> Rows:
        """Return a view of the first rows."""
        return Rows(*(column[:num_rows] for column in self))


class SamplePositions(NamedTuple):
    """The D positions that a step with drafts samples at, row after row.

    tokens: int64 [D], the index of each among the step's tokens; slots: int64 [D]. context_len: int32 [D], tokens
    before the id to sample; filled by the body.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    context_len: torch.Tensor


class SampledRows(NamedTuple):
    """Rows to sample, int64: the first `num_real` of them; the others fill up a shape."""

    rows: torch.Tensor
    num_real: int


class HiddenStates(NamedTuple):
    """The result of a body: tokens [T, hidden_size], row after row; last [R, hidden_size], each row's last token."""

    tokens: torch.Tensor
    last: torch.Tensor


class StepTensors(NamedTuple):
    """The result of a step on the device; rows: those that yield, in order (None: all).

    lengths: int64 [R], the ids that each row keeps, in a step with drafts, whose ids [D] are those of its draws.
    """

    sampled: SampledTokens
    rows: list[int] | None = None
    prompts: LogprobRecords = NO_RECORDS
    lengths: torch.Tensor | None = None


#: Launches the tail of a step whose body is launched.
Tail = Callable[[], StepTensors]
#: Launches the body of a batch whose changes are applied; does not wait for the device.
Launch = Callable[[Batch], Tail]


class Step:
    """The body and the tail of a step.

    Args:
        decoder, table: the model, the slots.
        pages: those of every section of the plan's groups, as in KVCache.
        kernels: read and write the slot table, and sample.
        max_rows: the most rows, padding included.
        is_draft_model: whether the decoder's groups are attached to those of the served model (`core.kv.attached`).
    """

    def __init__(
        self,
        decoder: Decoder,
        table: SlotTable,
        pages: Sequence[torch.Tensor],
        kernels: Kernels,
        max_rows: int,
        *,
        is_draft_model: bool = False,
    ) -> None:
        self.table = table
        self.sampler = Sampler(decoder, table, kernels)
        self.record_prompts = PromptLogprobRecorder(decoder, table, kernels)
        self.max_rows = max_rows
        self.max_model_len = decoder.max_model_len
        self._decoder = decoder
        find = _draft_model_pages if is_draft_model else _own_pages
        self._pages = find(decoder, table.plan, pages)
        self._kernels = kernels
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=table.device)

    def body(self, rows: Rows, shape: StepShape, bounds: Bounds, out: torch.Tensor | None = None) -> HiddenStates:
        """Launch the body; the `last` of a mixed step are in `out` if that is given."""
        return self._decode(rows, bounds) if shape.kind == "decode" else self._mixed(rows, shape, bounds, out)

    def tail(
        self, rows: Rows, states: torch.Tensor, level: SamplingLevel, to_sample: SampledRows | None = None
    ) -> SampledTokens:
        """Sample an id for each row and store it in the slot table; ids of rows that do not yield have no meaning.

        Args:
            states: [R, hidden_size], the `last` of HiddenStates.
            to_sample: the rows to sample, all that yield among them; None: all.
        """
        sampled = self._sample(rows, states, level, to_sample)
        if level.is_processed:
            self._kernels.count_sampled(rows.slots, rows.yields, sampled.ids, self.table.processing.penalties)
        self._kernels.advance(rows.slots, rows.counts, rows.yields, sampled.ids, self.table.state)
        return sampled

    def verify(
        self, rows: Rows, draws: SamplePositions, shape: StepShape, bounds: Bounds, out: torch.Tensor | None = None
    ) -> HiddenStates:
        """Launch the body of a step with drafts.

        The `last` of the result are those of the draws [D, hidden_size], in `out` if that is given.
        """
        found, hidden = self.forward(rows, shape, bounds)
        torch.add(found.position[draws.tokens], 1, out=draws.context_len)
        return HiddenStates(hidden, torch.index_select(hidden, 0, draws.tokens, out=out))

    def accepting_tail(
        self, rows: Rows, draws: SamplePositions, states: torch.Tensor, level: SamplingLevel
    ) -> tuple[SampledTokens, torch.Tensor]:
        """Sample an id at each draw, keep those behind drafts that were right; return the ids and the kept of each row.

        Args:
            states: [D, hidden_size], the `last` of `verify`.
        """
        sampled = self.sampler(states, draws.slots, draws.context_len, level)
        return sampled, self.accept(rows, sampled.ids, level)

    def accept(self, rows: Rows, ids: torch.Tensor, level: SamplingLevel) -> torch.Tensor:
        """Keep the right ids of those sampled at a step's draws; return the number of each row, int64 [R]."""
        counted = self.table.processing.penalties if level.is_processed else None
        return self._kernels.accept(rows.slots, rows.counts, rows.yields, ids, self.table.state, counted)

    def decode(self, rows: Rows, bounds: Bounds, state: SlotState | None = None) -> torch.Tensor:
        """Compute one token of each row, none of which is new, at the positions of `state` (None: the table's)."""
        found, ctx = self.decode_inputs(rows, bounds, state)
        return self._decoder.forward(found.token, ctx)

    def decode_inputs(self, rows: Rows, bounds: Bounds, state: SlotState | None = None) -> tuple[Inputs, StepContext]:
        """Return the inputs of `decode`."""
        table, query_start = self.table, self._starts[: rows.slots.shape[0] + 1]
        found = self._kernels.decode_inputs(rows.slots, rows.context_len, state or table.state, table.block_size)
        # Only a row's own newest key is written while it attends.
        return found, self._context(found._replace(query_start=query_start), rows, bounds, history_is_settled=True)

    def _decode(self, rows: Rows, bounds: Bounds) -> HiddenStates:
        hidden = self.decode(rows, bounds)
        return HiddenStates(hidden, hidden)

    def _mixed(self, rows: Rows, shape: StepShape, bounds: Bounds, out: torch.Tensor | None) -> HiddenStates:
        found, hidden = self.forward(rows, shape, bounds)
        return HiddenStates(hidden, torch.index_select(hidden, 0, found.last, out=out))

    def forward(
        self, rows: Rows, shape: StepShape, bounds: Bounds, state: SlotState | None = None
    ) -> tuple[Inputs, torch.Tensor]:
        """Compute tokens of rows from the positions of `state` on (None: the table's); return all hidden states."""
        found, ctx = self.inputs(rows, shape, bounds, state)
        return found, self._decoder.forward(found.token, ctx)

    def inputs(
        self, rows: Rows, shape: StepShape, bounds: Bounds, state: SlotState | None = None
    ) -> tuple[Inputs, StepContext]:
        """Return the inputs of `forward`."""
        table = self.table
        found = self._kernels.mixed_inputs(
            rows.slots, rows.counts, rows.context_len, shape.num_tokens, state or table.state, table.block_size
        )
        # In a verify step a row reads no new keys but its own queries'.
        return found, self._context(found, rows, bounds, history_is_settled=shape.kind == "verify")

    def _context(self, found: Inputs, rows: Rows, bounds: Bounds, *, history_is_settled: bool) -> StepContext:
        kv = []
        for number, (place, (group, pages, window)) in enumerate(zip(self._decoder.places, self._pages, strict=True)):
            meta = AttentionMetadata(
                query_start=found.query_start,
                context_len=rows.context_len,
                block_tables=found.block_tables[group],
                scale=place.spec.scale,
                window=window,
                **bounds._asdict(),
            )
            slot_mapping = found.slot_mapping[group]
            kv.append(
                self._decoder.group_context(number, pages, slot_mapping, meta, history_is_settled=history_is_settled)
            )
        return StepContext(found.position, tuple(kv), rows.slots.shape[0], found.num_real)

    def _sample(
        self, rows: Rows, states: torch.Tensor, level: SamplingLevel, to_sample: SampledRows | None
    ) -> SampledTokens:
        if to_sample is None:
            return self.sampler(states, rows.slots, rows.context_len, level)
        chosen, num_real = to_sample
        if not num_real:
            return SampledTokens(torch.zeros_like(rows.slots))
        sampled = self.sampler(states[chosen], rows.slots[chosen], rows.context_len[chosen], level)
        return SampledTokens(*(each if each is None else _at(chosen, num_real, each, rows) for each in sampled))


class PlacePages(NamedTuple):
    """The pages of one of a decoder's places, the group whose block tables point into them, and the layers' window."""

    group: int
    pages: torch.Tensor
    window: int


def _own_pages(decoder: Decoder, plan: KVPlan, pages: Sequence[torch.Tensor]) -> tuple[PlacePages, ...]:
    return tuple(PlacePages(group, pages[section], plan.groups[group].window) for group, section, _ in decoder.places)


def _draft_model_pages(decoder: Decoder, plan: KVPlan, pages: Sequence[torch.Tensor]) -> tuple[PlacePages, ...]:
    counts = [len(group.sections) for group in decoder.kv_groups]
    own = len(plan.groups[0].sections) - sum(counts)
    return tuple(
        PlacePages(0, pages[own + sum(counts[:group]) + section], decoder.kv_groups[group].window)
        for group, section, _ in decoder.places
    )


def _at(chosen: torch.Tensor, num_real: int, sampled: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return [R, …] with the values of the chosen rows; 0 for all others."""
    spread = sampled.new_zeros((rows.slots.shape[0], *sampled.shape[1:]))
    spread[chosen[:num_real]] = sampled[:num_real]
    return spread


def is_verify(batch: Batch) -> bool:
    """Return whether every row samples after each of its tokens, and no row is new."""
    return bool(batch.drafts) and not batch.admissions and batch.counts == batch.yields


def is_decode(batch: Batch) -> bool:
    """Return whether every row is one token, yields, and reads no key that another row of the batch writes."""
    return not batch.admissions and len(batch.slots) == sum(batch.counts) and 0 not in batch.yields
