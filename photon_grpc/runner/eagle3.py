"""Drafts by an EAGLE-3 head, from states within the served model.

The head's position p has the model's state at p and the id at p + 1, so that its newest position can be computed only
once the id behind it is sampled. What states are made of, the streams of a row's last tokens, is therefore carried to
the next draft:

    ingest: the streams of a step's tokens -> carried; positions of prompts -> the head's keys
    draft:  the carried positions -> draft 1 of each row; each draft and its state -> the next one

Behind a step of one token a row streams stay where the model left them, until a draft or the next step: a step that
drafts nothing launches nothing for the head.

Keys lie in a section of the model's own blocks. They may be missing or stale, after steps without drafts and behind a
cached prefix: then fewer drafts are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.core.kv import KVGroup
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.slot_state import Inputs
from photon_grpc.models.eagle3 import Eagle3Head
from photon_grpc.runner.draft_graphs import MAX_ROWS, DraftGraphs
from photon_grpc.runner.draft_passes import PassDrafter
from photon_grpc.runner.drafting import Drafter
from photon_grpc.runner.graphs import Capture
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Bounds, Rows, Step, StepShape


class Eagle3Drafter(PassDrafter):
    """A drafter that is a head on the served model.

    Args:
        max_drafts: the most drafts of a row.
        head: the head, which the model's steps fill with streams.
        table: the slots of the served model.
        cache: the pages of both.
        graphs: replay forwards.
    """

    LAG = 2

    def __init__(
        self, max_drafts: int, head: Eagle3Head, table: SlotTable, cache: KVCache, graphs: DraftGraphs
    ) -> None:
        super().__init__(max_drafts, table, Sampler(head, table, head.kernels, has_masks=False), graphs)
        self._head = head
        self._step = Step(head, table, cache.pages, head.kernels, max(table.num_slots, MAX_ROWS), is_draft_model=True)
        #: Streams of the last tokens of every slot that the model has computed, and the position of the first of them.
        streams = head.streams
        self._width = 1 + max_drafts
        self._carried = streams.new_zeros(table.num_slots * self._width, streams.shape[1])
        self._first = torch.zeros(table.num_slots, dtype=torch.int64, device=table.device)
        #: The states behind which the next drafts are made, of the rows of a step.
        self._newest = streams.new_zeros(max(table.num_slots, MAX_ROWS), head.hidden_size)
        #: The rows of the newest step, of one token each, whose streams are not carried yet.
        self._left: tuple[int, ...] = ()
        #: Slot -> the number of its carried streams.
        self._num_carried: dict[int, int] = {}

    def ingest(self, batch: Batch) -> None:
        if sum(batch.counts) == len(batch.slots) and batch.counts == batch.yields:
            # Under load all steps are so.
            self._left = batch.slots
            return
        self._left = ()
        kept = [min(count, self._width) for count in batch.counts]
        self._num_carried.update(zip(batch.slots, kept, strict=True))
        self._carry(batch, kept)
        self._compute_prompts(batch)

    def draft(self, batch: Batch) -> None:
        if self._left:
            self._carry_left(self._left)
            self._left = ()
        super().draft(batch)

    def _carry_left(self, slots: tuple[int, ...]) -> None:
        """Keep the streams of the newest step, which had one token of every row."""
        self._num_carried.update(dict.fromkeys(slots, 1))
        sent = self._table.to_device(slots, torch.int64)
        self._carried[sent * self._width] = self._head.streams[: len(slots)]
        # By now that token is counted.
        self._first[sent] = self._table.numbers.num_computed[sent] - 1

    def _carry(self, batch: Batch, kept: list[int]) -> None:
        """Keep the streams of the last tokens of every row."""
        sources: list[int] = []
        places: list[int] = []
        for slot, end, count in zip(batch.slots, accumulate(batch.counts), kept, strict=True):
            sources += range(end - count, end)
            places += range(slot * self._width, slot * self._width + count)
        before = [count - own for count, own in zip(batch.counts, kept, strict=True)]
        num_streams, num_rows = len(sources), len(before)
        sent = self._table.to_device((*sources, *places, *batch.slots, *before), torch.int64)
        of_streams, of_rows = sent[: 2 * num_streams].view(2, num_streams), sent[2 * num_streams :].view(2, num_rows)
        self._carried[of_streams[1]] = self._head.streams[of_streams[0]]
        self._first[of_rows[0]] = self._table.numbers.num_computed[of_rows[0]] + of_rows[1]

    def _compute_prompts(self, batch: Batch) -> None:
        """Compute the keys of rows whose tokens are not all sampled behind: parts of prompts."""
        parts, tokens, start = [], [], 0
        for slot, count, yields in zip(batch.slots, batch.counts, batch.yields, strict=True):
            if count != yields and slot not in self._table.undrafted:
                # Their drafts are none of a prompt's.
                parts.append((slot, count))
                tokens += range(start, start + count)
            start += count
        if not parts:
            return
        rows, shape, bounds = self._send(parts)
        found, ctx = self._step.inputs(rows, shape, bounds)
        states = self._head.states(self._head.streams[self._table.to_device(tokens, torch.int64)])
        _, row = _rows_of(found, shape.num_tokens)
        self._head.draft(self._following(rows.slots[row], found.position), states, ctx)

    def _following(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the ids behind these positions; behind the newest of a prompt, any."""
        ids = self._table.token_ids
        return ids[slots, (positions + 1).clamp(max=ids.shape[1] - 1)]

    def _draft_first(self, slots: list[int], level: SamplingLevel) -> torch.Tensor:
        """Compute the carried positions, and write the draft behind the newest; return the slots."""
        self._prepare(len(slots))
        counts = [self._num_carried.get(slot, 1) for slot in slots]
        replayed = self._graphs("the first", slots, counts)
        if replayed is None:
            rows, shape, bounds = self._send(list(zip(slots, counts, strict=True)))
            replayed = rows.slots, self._first_states(rows, shape, bounds)
        sent, hidden = replayed
        self._write(hidden, sent, 0, level)
        return sent

    def _prepare(self, num_rows: int) -> None:
        """Prepare all replays of so many rows, before one of them keeps states that another reads."""
        longest = self._table.token_ids.shape[1]

        def first(rows: Rows) -> torch.Tensor:
            size = len(rows.slots)
            shape, bounds = StepShape("mixed", self._width * size, size), Bounds(self._width, 1, longest)
            return self._first_states(rows, shape, bounds)

        self._graphs.prepare("the first", num_rows, first)
        self._graphs.prepare("further", num_rows, lambda rows: self._next(rows, self._graphs.behind, longest))

    def _first_states(self, rows: Rows, shape: StepShape, bounds: Bounds) -> torch.Tensor:
        """Compute the carried positions of every row; return the hidden states behind the newest, keep its states."""
        table = self._table
        found, ctx = self._step.inputs(rows, shape, bounds, table.state._replace(num_computed=self._first))
        begins, row = _rows_of(found, shape.num_tokens)
        number = torch.arange(shape.num_tokens, device=table.device) - begins[row]
        places = rows.slots[row] * self._width + number.clamp(max=self._width - 1)
        ids = self._following(rows.slots[row], found.position)
        hidden, states = self._head.draft(ids, self._head.states(self._carried[places]), ctx)
        # Of the last step's tokens those behind refused drafts are no longer the row's.
        newest = table.numbers.num_known[rows.slots] - 2 - self._first[rows.slots]
        newest = begins[:-1] + newest.minimum(rows.counts - 1).clamp(min=0)
        newest = newest.clamp(max=shape.num_tokens - 1)
        self._newest[: len(newest)] = states[newest]
        return hidden[newest]

    def _next(self, rows: Rows, behind: int | torch.Tensor, longest: int) -> torch.Tensor:
        """Compute the position `behind` the newest id of every row; return the hidden states behind it.

        Its states are kept.
        """
        table, states = self._table, self._newest[: len(rows.slots)]
        # Of the ids of a position the one behind it is read, which is known.
        state = table.state._replace(
            num_computed=(table.numbers.num_known + behind).clamp(min=0), token_ids=table.token_ids[:, 1:]
        )
        found, ctx = self._step.decode_inputs(rows, Bounds(1, 1, longest), state)
        hidden, following = self._head.draft(found.token, states, ctx)
        states.copy_(following)
        return hidden


def _rows_of(found: Inputs, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each row begins [R + 1], and the row of each token [T]; surplus tokens are of the last one."""
    assert found.query_start is not None
    begins = found.query_start.long()
    numbers = torch.arange(num_tokens, device=begins.device)
    return begins, torch.searchsorted(begins[1:], numbers, right=True).clamp(max=len(begins) - 2)


@dataclass(frozen=True, slots=True)
class Eagle3Speculation:
    """Drafts by a head, loaded."""

    max_drafts: int
    head: Eagle3Head

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.head.kv_groups

    def drafter(self, table: SlotTable, kernels: Kernels, cache: KVCache, capture: Capture | None) -> Drafter:
        return Eagle3Drafter(self.max_drafts, self.head, table, cache, DraftGraphs(capture, table))
