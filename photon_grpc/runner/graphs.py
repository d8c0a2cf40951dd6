"""CUDA graphs of a step: a body per shape, a tail per bucket of rows and level, always two replays.

A graph has fixed shapes, so a batch is padded to the next bucket: surplus rows carry slot 0, whose table points at
block 0; they write their keys there, their samples are not read, and the state they change is that of slot 0, which is
reset. The host sends the slots when they change and nothing else: last tokens and positions are on the device.

Bodies with the same number of rows end in one buffer, from which their tail samples. It is the output of the decode
body of these rows, so that decode steps launch no copy. All graphs share one pool of memory: a body's output lasts
until another graph than its own tail is replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.runner.buckets import Buckets, decode_shape
from photon_grpc.runner.sampler import SampledTokens, SamplingLevel
from photon_grpc.runner.step import Bounds, Launch, Rows, Step, StepShape, StepTensors, Tail
from photon_grpc.runner.streams import launching_on

_LOG = logging.getLogger(__name__)


Tensors = TypeVar("Tensors")
#: Repeats what was captured, into the same tensors.
Replay = tuple[Callable[[], Any], Tensors]


class Capture(Protocol):
    """A maker of Replays; it calls the function, which takes no arguments."""

    def __call__(self, function: Callable[[], Tensors], /) -> Replay[Tensors]: ...


class GraphLaunch:
    """Launches by replays of the next larger bucket; batches without one go to `eager`.

    Args:
        step: the step that is captured.
        eager: launches every other batch.
        buckets: the shapes to capture.
        capture: makes a replay.
    """

    def __init__(self, step: Step, eager: Launch, buckets: Buckets, capture: Capture) -> None:
        self._step = step
        self._eager = eager
        self._buckets = buckets
        self._capture = capture
        #: int64 [3, rows]: slots, counts, yields of `_rows`.
        self._columns = torch.zeros((3, step.max_rows), dtype=torch.int64, device=step.table.device)
        context_len = torch.zeros(step.max_rows, dtype=torch.int32, device=step.table.device)
        self._rows = Rows(*self._columns, context_len)
        #: Bodies, whose outputs are the hidden states of the rows' last tokens.
        self.bodies: dict[StepShape, Replay[torch.Tensor] | None] = {}
        self._tails: dict[tuple[int, SamplingLevel], Callable[[], SampledTokens]] = {}
        #: Slots of the decode step that `_rows` holds; () where it holds something else.
        self._slots: tuple[int, ...] = ()

    def __call__(self, batch: Batch) -> Tail:
        shape = self._buckets.shape(batch)
        body = None if shape is None else self._body(shape)
        if shape is None or body is None:
            return self._eager(batch)
        replay_body, _ = body
        tail = self._tail(shape.num_rows, self._step.sampler.level(batch), body)
        yielding = self._send(batch, shape)
        replay_body()

        return lambda: StepTensors(tail(), yielding)

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Capture every shape, of each kind the largest first: the smaller ones fit into the memory that it took."""
        rows = sorted({*self._buckets.rows, *self._buckets.mixed}, reverse=True)
        shapes, levels = list(self._buckets.mixed_shapes()), list(reversed(SamplingLevel))
        total = len(rows) * (1 + len(levels)) + len(shapes)
        done = 0
        for num_rows in rows:
            body = self._body(decode_shape(num_rows))
            for level in levels if body is not None else ():
                self._tail(num_rows, level, body)
            done += 1 + len(levels)
            progress(done, total)
        for shape in shapes:
            self._body(shape)
            done += 1
            progress(done, total)

    def _body(self, shape: StepShape) -> Replay[torch.Tensor] | None:
        """Return the body, captured on first use; None if it could not be captured and its batches run eagerly."""
        if shape not in self.bodies:
            self.bodies[shape] = self._capture_body(shape)
        return self.bodies[shape]

    def _capture_body(self, shape: StepShape) -> Replay[torch.Tensor] | None:
        out = None
        if shape.kind == "mixed":
            decode = self._body(decode_shape(shape.num_rows))
            if decode is None:
                return None
            _, out = decode
        rows, bounds = self._rows.first(shape.num_rows), self._bounds(shape)
        return self._captured(lambda: self._step.body(rows, shape, bounds, out).last, shape)

    def _tail(self, num_rows: int, level: SamplingLevel, body: Replay[torch.Tensor]) -> Callable[[], SampledTokens]:
        """Return the tail of all bodies of `num_rows` rows, over the buffer of `body`; eager if it was not captured."""
        key = num_rows, level
        if key not in self._tails:
            _, states = body
            function = partial(self._step.tail, self._rows.first(num_rows), states, level)
            captured = self._captured(function, key)
            self._tails[key] = function if captured is None else partial(_replayed, *captured)
        return self._tails[key]

    def _captured(self, function: Callable[[], Tensors], what: object) -> Replay[Tensors] | None:
        self._slots = ()
        for column in self._rows:
            # All rows are padding: a call changes no sequence's state.
            column.zero_()
        try:
            return self._capture(function)
        except Exception as error:
            # No memory, or (Triton's errors are no RuntimeErrors) no room on this device for a kernel.
            # A lost device raises again when the step is computed.
            _LOG.warning("cannot capture %s: it runs eagerly", what, exc_info=error)
            return None

    def _bounds(self, shape: StepShape) -> Bounds:
        if shape.kind == "decode":
            return Bounds(1, 1, self._step.max_model_len)
        return Bounds(shape.num_tokens, 2 if shape.num_rows == 1 else 1, self._step.max_model_len)

    def _send(self, batch: Batch, shape: StepShape) -> list[int] | None:
        """Fill the static rows; return those that yield, None if all do."""
        num_rows, surplus = len(batch.slots), (0,) * (shape.num_rows - len(batch.slots))
        slots = batch.slots + surplus
        if shape.kind == "mixed" or slots != self._slots:
            # Set once they are sent: if sending fails, the next step sends again.
            self._slots = ()
            columns = (*slots, *batch.counts, *surplus, *batch.yields, *surplus)
            sent = self._step.table.to_device(columns, torch.int64).view(3, shape.num_rows)
            self._columns[:, : shape.num_rows].copy_(sent, non_blocking=True)
            self._slots = slots if shape.kind == "decode" else ()
        if shape.kind == "decode":
            return list(range(num_rows)) if surplus else None
        return [row for row, yields in enumerate(batch.yields) if yields]


def _replayed(replay: Callable[[], Any], out: Tensors) -> Tensors:
    replay()
    return out


class CudaCapture:
    """Capture into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(torch.cuda.current_device())

    def __call__(self, function: Callable[[], Tensors], /) -> Replay[Tensors]:
        # Call it once outside the graph: compiling, loading and allocating at a first call cannot be captured.
        with launching_on(self._stream) as before:
            self._stream.wait_stream(before)
            function()
        before.wait_stream(self._stream)
        torch.cuda.synchronize(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = function()
        return graph.replay, out


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all captures: the matrix library keeps 32 MiB for each that it multiplied on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
