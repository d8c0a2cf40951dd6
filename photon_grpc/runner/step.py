"""One step on tensors: a body, from the slot table to the hidden rows to draw from, and a tail, to the drawn ids and
back into the table.

    states = step.body(rows, shape, bounds)
    ids = step.tail(rows, states, level)

`eager.py` calls both with the exact shape of a batch, `graphs.py` captures both in padded shapes and replays them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.kernels import AttentionMetadata, Kernels
from photon_grpc.kernels.slot_state import Inputs
from photon_grpc.layers.context import StepContext
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable


class StepShape(NamedTuple):
    """Of a body. In a decode step every row is one token, and no row is new."""

    kind: Literal["decode", "mixed"]
    num_tokens: int
    num_rows: int


class Bounds(NamedTuple):
    """Known to the host of the rows' lengths, so that nothing waits for the device to say them."""

    max_query_len: int
    min_query_len: int
    max_context_len: int


class Rows(NamedTuple):
    """The R rows of a step. A padding row has slot 0, computes nothing and yields nothing.

    slots, counts (tokens to compute), yields (1 where an id is drawn): int64 [R], of the host.
    context_len: int32 [R], tokens before the id to draw; filled by the body.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    yields: torch.Tensor
    context_len: torch.Tensor

    def first(self, num_rows: int) -> Rows:
        """Views of the first rows."""
        return Rows(*(column[:num_rows] for column in self))


class Drawing(NamedTuple):
    """Rows to draw for, int64: the first `num_real` of them; the others fill up a shape."""

    rows: torch.Tensor
    num_real: int


class SampledTokens(NamedTuple):
    """Ids that a step has put on the device, int64, and those of its rows that yield, in order (None: all)."""

    ids: torch.Tensor
    rows: list[int] | None = None


#: Launches the tail of a step whose body is launched.
Tail = Callable[[], SampledTokens]
#: Launches the body of a batch whose changes are applied; does not wait for the device.
Launch = Callable[[Batch], Tail]


class Step:
    """
    Args:
        decoder, table, pages: the model, the slots, the KV cache.
        kernels: the way out of the slot table and back, and what draws.
        max_rows: the most rows, padding included.
    """

    def __init__(
        self, decoder: Decoder, table: SlotTable, pages: torch.Tensor, kernels: Kernels, max_rows: int
    ) -> None:
        self.table = table
        self.sampler = Sampler(decoder, table, kernels)
        self.max_rows = max_rows
        self.max_model_len = decoder.max_model_len
        self._decoder = decoder
        self._pages = pages
        self._kernels = kernels
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=table.device)

    def body(self, rows: Rows, shape: StepShape, bounds: Bounds, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden_size]: the hidden state of each row's last token, of a mixed step in `out` where it is given."""
        return self._decode(rows, bounds) if shape.kind == "decode" else self._mixed(rows, shape, bounds, out)

    def tail(
        self, rows: Rows, states: torch.Tensor, level: SamplingLevel, drawing: Drawing | None = None
    ) -> torch.Tensor:
        """int64 [R]: the drawn ids, which the slot table has then too; that of a row that does not yield means nothing.

        Args:
            drawing: the rows to draw for, all that yield among them; None: all.
        """
        ids = self._draw(rows, states, level, drawing)
        self._kernels.advance(rows.slots, rows.counts, rows.yields, ids, self.table.state)
        return ids

    def _decode(self, rows: Rows, bounds: Bounds) -> torch.Tensor:
        table, query_start = self.table, self._starts[: rows.slots.shape[0] + 1]
        found = self._kernels.decode_inputs(rows.slots, rows.context_len, table.state, table.block_size)
        # No row of such a step is new: only its own newest key is written while it attends.
        ctx = self._context(found._replace(query_start=query_start), rows, bounds, history_is_settled=True)
        return self._decoder.forward(found.token, ctx)

    def _mixed(self, rows: Rows, shape: StepShape, bounds: Bounds, out: torch.Tensor | None) -> torch.Tensor:
        table = self.table
        found = self._kernels.mixed_inputs(
            rows.slots, rows.counts, rows.context_len, shape.num_tokens, table.state, table.block_size
        )
        hidden = self._decoder.forward(found.token, self._context(found, rows, bounds, history_is_settled=False))
        return torch.index_select(hidden, 0, found.last, out=out)

    def _context(self, found: Inputs, rows: Rows, bounds: Bounds, *, history_is_settled: bool) -> StepContext:
        kv = []
        for number, group in enumerate(self.table.plan.groups):
            meta = AttentionMetadata(
                query_start=found.query_start,
                context_len=rows.context_len,
                block_tables=found.block_tables[number],
                scale=self._decoder.attention_scale,
                window=group.window,
                **bounds._asdict(),
            )
            slot_mapping = found.slot_mapping[number]
            kv.append(
                self._decoder.group_context(
                    number, self._pages, slot_mapping, meta, history_is_settled=history_is_settled
                )
            )
        return StepContext(found.position, tuple(kv))

    def _draw(self, rows: Rows, states: torch.Tensor, level: SamplingLevel, drawing: Drawing | None) -> torch.Tensor:
        if drawing is None:
            return self.sampler(states, rows.slots, rows.context_len, level)
        ids, (chosen, num_real) = torch.zeros_like(rows.slots), drawing
        if num_real:
            drawn = self.sampler(states[chosen], rows.slots[chosen], rows.context_len[chosen], level)
            ids[chosen[:num_real]] = drawn[:num_real]
        return ids


def is_decode(batch: Batch) -> bool:
    """Whether every row is one token, draws, and reads no key that another row of the batch writes."""
    return not batch.admissions and len(batch.slots) == sum(batch.counts) and 0 not in batch.yields
