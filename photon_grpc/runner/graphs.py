"""CUDA graphs: a whole step, from the slot table to the drawn ids and back into the slot table, as one replay.

A graph has fixed shapes, so a batch is padded to the next bucket: surplus rows carry slot 0, whose table points at block 0; they write their
keys there, nobody reads what they draw, and the state they change is that of slot 0, put back to nothing. The host sends the slots when they
change and nothing else: last tokens and positions are on the device.

Two kinds of shape: `decode`, B rows of one token; `mixed`, T tokens shared out over at most R rows: one row for a prompt alone, which nobody who
decodes shares the step with, few rows for a short prompt that should not wait, some or all rows for a chunk of prompt beside those who decode
(the head multiplies every row of the shape). Longer steps run eagerly: they hide what launching costs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.kernels import AttentionMetadata, Kernels
from photon_grpc.layers.context import StepContext
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import SampledTokens, Step

_LOG = logging.getLogger(__name__)

DECODE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
#: Tokens of a prompt alone (at least two), of mixed steps with at most SHORT_ROWS rows, with at most MEDIUM_ROWS, and with any number.
LONE_BUCKETS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
SHORT_BUCKETS = (32, 64, 128, 256, 512)
SHORT_ROWS = 16
MEDIUM_BUCKETS = (96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048)
MEDIUM_ROWS = 64
LONG_BUCKETS = (256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


class Shape(NamedTuple):
    """What a graph is captured for. A decode step has as many tokens as rows."""

    num_tokens: int
    num_rows: int
    width: SamplingLevel

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_rows


#: What replays a step, and the buffer of ids that every replay fills.
Replay = tuple[Callable[[], Any], torch.Tensor]
#: Makes a Replay from a function without arguments.
Capture = Callable[[Callable[[], torch.Tensor]], Replay]


class PaddedStep:
    """A step of fixed shapes over static inputs, as a graph holds it; runs on any device.

    Args:
        decoder, table, pages, tail: as for EagerStep.
        kernels: the way out of the slot table and back.
        max_rows: the longest batch that will be asked for.
    """

    def __init__(
        self,
        decoder: Decoder,
        table: SlotTable,
        pages: torch.Tensor,
        tail: Sampler,
        kernels: Kernels,
        max_rows: int,
    ) -> None:
        self._kernels = kernels
        self._decoder = decoder
        self._table = table
        self._pages = pages
        self._tail = tail
        device = table.device
        #: Slots, then per row the tokens to compute and whether it yields; rows in use, then padding.
        self.slots = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self.slots)
        self.yields = torch.zeros_like(self.slots)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """All rows are padding: a call changes no sequence's state."""
        self.slots.zero_()
        self.counts.zero_()
        self.yields.zero_()

    def __call__(self, shape: Shape) -> torch.Tensor:
        """ids int64 [shape.num_rows] of the rows in `slots`; those of rows that do not yield mean nothing."""
        return self._decode(shape) if shape.is_decode else self._mixed(shape)

    def _decode(self, shape: Shape) -> torch.Tensor:
        num_rows, table = shape.num_rows, self._table
        slots = self.slots[:num_rows]
        token, position, slot_mapping, context_len, block_tables = self._kernels.decode_inputs(
            slots, table.token_ids, table.num_computed, table.block_table, table.block_size
        )
        attention = self._meta(self._starts[: num_rows + 1], context_len, block_tables, max_query_len=1)
        # No row of such a step is new: only its own newest key is written while it attends.
        kv = self._decoder.group_context(self._pages, slot_mapping, attention, history_is_settled=True)
        hidden = self._decoder.forward(token, StepContext(position, (kv,)))
        ids = self._tail(hidden, slots, context_len, shape.width)
        self._kernels.advance(slots, ids, table.token_ids, table.num_computed)
        return ids

    def _mixed(self, shape: Shape) -> torch.Tensor:
        num_tokens, num_rows, width = shape
        table = self._table
        slots, counts, yields = self.slots[:num_rows], self.counts[:num_rows], self.yields[:num_rows]
        token, position, slot_mapping, context_len, block_tables, query_start, last = self._kernels.mixed_inputs(
            slots, counts, num_tokens, table.token_ids, table.num_computed, table.block_table, table.block_size
        )
        fewest = 2 if num_rows == 1 else 1
        attention = self._meta(query_start, context_len, block_tables, max_query_len=num_tokens, min_query_len=fewest)
        kv = self._decoder.group_context(self._pages, slot_mapping, attention)
        hidden = self._decoder.forward(token, StepContext(position, (kv,)))
        ids = self._tail(hidden[last], slots, context_len, width)
        self._kernels.advance_mixed(slots, counts, yields, ids, table.token_ids, table.num_computed)
        return ids

    def _meta(
        self,
        query_start: torch.Tensor,
        context_len: torch.Tensor,
        block_tables: torch.Tensor,
        max_query_len: int,
        min_query_len: int = 1,
    ) -> AttentionMetadata:
        return AttentionMetadata(
            query_start=query_start,
            context_len=context_len,
            block_tables=block_tables,
            scale=self._decoder.attention_scale,
            max_query_len=max_query_len,
            max_context_len=self._decoder.max_model_len,
            min_query_len=min_query_len,
        )


class GraphStep:
    """Replays what a bucket fits, hands the rest to `eager`.

    Args:
        padded: the step that is captured.
        eager: what computes every other batch.
        table, tail: choose the width of a batch.
        capture: how a replay is made.
        max_num_seqs: no decode bucket beyond the next above it.
    """

    def __init__(
        self, padded: PaddedStep, eager: Step, table: SlotTable, tail: Sampler, capture: Capture, max_num_seqs: int
    ) -> None:
        self._padded = padded
        self._eager = eager
        self._table = table
        self._tail = tail
        self._capture = capture
        self.decode_buckets = decode_buckets(max_num_seqs)
        self._mixed_buckets = mixed_buckets(max_num_seqs)
        self._replays: dict[Shape, Replay | None] = {}
        self._slots: tuple[int, ...] = ()

    def __call__(self, batch: Batch) -> SampledTokens:
        shape = self._shape(batch)
        if shape is None:
            return self._eager(batch)
        found = self._find(shape)
        if found is None:
            return self._eager(batch)
        replay, ids = found
        num_rows = len(batch.slots)
        if shape.is_decode:
            self._send_slots(batch.slots, shape.num_rows)
            rows = list(range(num_rows)) if shape.num_rows > num_rows else None
        else:
            self._send_columns(batch, shape.num_rows)
            rows = [row for row, yields in enumerate(batch.yields) if yields]
        replay()
        return SampledTokens(ids, rows)

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Captures every shape, largest first, so that the smaller ones fit into the memory it took."""
        sizes = [(tokens, rows) for rows, buckets in self._mixed_buckets.items() for tokens in buckets]
        sizes += [(rows, rows) for rows in self.decode_buckets]
        shapes = [Shape(*size, width) for size in sorted(sizes, reverse=True) for width in reversed(self._tail.widths)]
        for done, shape in enumerate(shapes):
            self._find(shape)
            progress(done + 1, len(shapes))

    def _shape(self, batch: Batch) -> Shape | None:
        """The smallest shape that holds the batch; None where none does."""
        num_rows, num_tokens = len(batch.slots), sum(batch.counts)
        width = self._tail.width(batch.slots)
        is_decode = num_rows == num_tokens and 0 not in batch.yields and not batch.admissions
        if is_decode and num_rows <= self.decode_buckets[-1]:
            rows = self.decode_buckets[bisect_left(self.decode_buckets, num_rows)]
            return Shape(rows, rows, width)
        for rows, buckets in self._mixed_buckets.items():
            # A last token of a prompt that has no decode shape, being new or yielding nothing, is no prompt of two.
            if num_rows <= rows and num_tokens <= buckets[-1] and (rows > 1 or num_tokens > 1):
                return Shape(buckets[bisect_left(buckets, num_tokens)], rows, width)
        return None

    def _find(self, shape: Shape) -> Replay | None:
        """None where the shape could not be captured: it is computed eagerly."""
        if shape not in self._replays:
            self._padded.clear()
            self._slots = ()
            try:
                self._replays[shape] = self._capture(lambda: self._padded(shape))
            except Exception as error:
                # No memory, or (Triton's errors are no RuntimeErrors) no room on this device for a kernel.
                # A device that is lost says so again when the step is computed.
                _LOG.warning("cannot capture %s: such steps run eagerly", shape, exc_info=error)
                self._replays[shape] = None
        return self._replays[shape]

    def _send_slots(self, slots: tuple[int, ...], num_rows: int) -> None:
        padded = slots + (0,) * (num_rows - len(slots))
        if padded != self._slots:
            # Known once it is sent: where sending fails, the next step sends again.
            self._slots = ()
            self._padded.slots[:num_rows].copy_(self._table.to_device(padded, torch.int64), non_blocking=True)
            self._slots = padded

    def _send_columns(self, batch: Batch, num_rows: int) -> None:
        self._slots = ()
        surplus = (0,) * (num_rows - len(batch.slots))
        columns = (*batch.slots, *surplus, *batch.counts, *surplus, *batch.yields, *surplus)
        sent = self._table.to_device(columns, torch.int64).view(3, num_rows)
        for buffer, column in zip((self._padded.slots, self._padded.counts, self._padded.yields), sent, strict=True):
            buffer[:num_rows].copy_(column, non_blocking=True)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Those that a batch of at most `max_num_seqs` rows needs."""
    return DECODE_BUCKETS[: bisect_left(DECODE_BUCKETS, max_num_seqs) + 1]


def mixed_buckets(max_num_seqs: int) -> dict[int, tuple[int, ...]]:
    """Rows of mixed steps -> their buckets of tokens, the cheapest first. As many tokens as rows would be taken for a decode step."""
    max_rows = decode_buckets(max_num_seqs)[-1]
    few = {1: LONE_BUCKETS, SHORT_ROWS: SHORT_BUCKETS}
    if max_rows <= SHORT_ROWS:
        return few | {
            SHORT_ROWS: SHORT_BUCKETS + tuple(tokens for tokens in LONG_BUCKETS if tokens > SHORT_BUCKETS[-1])
        }
    if max_rows <= MEDIUM_ROWS:
        return few | {MEDIUM_ROWS: MEDIUM_BUCKETS}
    return few | {MEDIUM_ROWS: MEDIUM_BUCKETS, max_rows: tuple(tokens for tokens in LONG_BUCKETS if tokens > max_rows)}


class CudaCapture:
    """Captures into graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(torch.cuda.current_device())

    def __call__(self, function: Callable[[], torch.Tensor]) -> Replay:
        # Once outside the graph: what is compiled, loaded or allocated at a first call cannot be captured.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            ids = function()
        return graph.replay, ids


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all captures of a process: the matrix library keeps 32 MiB for good for every stream that it has multiplied on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
