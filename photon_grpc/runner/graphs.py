"""CUDA graphs of a step: a body per shape, a tail per bucket of rows and level, always two replays.

A graph has fixed shapes, so a batch is padded to the next bucket: surplus rows carry slot 0, whose table points at
block 0; they write their keys there, their samples are not read, and the state they change is that of slot 0, which is
reset. The host sends the slots when they change and nothing else: last tokens and positions are on the device.

Bodies that are sampled at the same number of positions end in one buffer, from which their tail samples. It is the
output of the decode body of as many rows, so that decode steps launch no copy; where there are not so many rows, of a
verify body. All graphs share one pool of memory: a
body's output lasts until another graph than its own tail is replayed.

A verify step has two sets of rows: those of its body, and for its tail one a position, which compute and yield
nothing, so that the tail only samples. What is kept is decided by a kernel behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.errors import ConfigError, StartupError
from photon_grpc.kernels.lang.streams import launching_on
from photon_grpc.runner.buckets import Buckets
from photon_grpc.runner.sampler import SampledTokens, SamplingLevel
from photon_grpc.runner.step import Bounds, Launch, Rows, SamplePositions, Step, StepShape, StepTensors, Tail
from photon_grpc.runner.upload import fill_columns

_LOG = logging.getLogger(__name__)


Tensors = TypeVar("Tensors")
#: Repeats what was captured, into the same tensors.
Replay = tuple[Callable[[], Any], Tensors]


class Capture(Protocol):
    """Makes a replay of a function, which takes no arguments.

    `before` launches the same kernels in less time, so that none is met for the first time in the function; None: the
    function does so itself. What kernels keep by weight may be new in the function: its memory was allocated before.
    """

    def __call__(
        self, function: Callable[[], Tensors], before: Callable[[], Any] | None = None, /
    ) -> Replay[Tensors]: ...


class GraphLaunch:
    """Launches by replays of the next larger bucket; batches without one go to `eager`.

    Args:
        step: the step that is captured.
        eager: launches every other batch.
        buckets: the shapes to capture.
        capture: makes a replay.
        short: the step with fewer layers, which launches the same kernels as `step`.
    """

    def __init__(self, step: Step, eager: Launch, buckets: Buckets, capture: Capture, short: Step) -> None:
        self._step = step
        self._short = short
        self._eager = eager
        self._buckets = buckets
        self._capture = capture
        #: int64 [3, rows]: slots, counts, yields of `_rows`.
        self._columns = torch.zeros((3, step.max_rows), dtype=torch.int64, device=step.table.device)
        context_len = torch.zeros(step.max_rows, dtype=torch.int32, device=step.table.device)
        self._rows = Rows(*self._columns, context_len)
        #: The same of the rows of a verify step's body, whose tail has those above.
        self._verify_columns = torch.zeros_like(self._columns)
        self._verify_rows = Rows(*self._verify_columns, torch.zeros_like(context_len))
        self._numbers = torch.arange(step.max_rows, device=step.table.device)
        #: Bodies, whose outputs are the hidden states of the rows' last tokens.
        self.bodies: dict[StepShape, Replay[torch.Tensor] | None] = {}
        self._tails: dict[tuple[int, SamplingLevel], Callable[[], SampledTokens]] = {}
        #: The step whose columns are there: its shape, slots and counts; None where they hold something else.
        self._sent: tuple[StepShape, tuple[int, ...], tuple[int, ...]] | None = None

    def __call__(self, batch: Batch) -> Tail:
        shape = self._buckets.shape(batch)
        body = None if shape is None else self._body(shape)
        if shape is None or body is None:
            return self._eager(batch)
        replay_body, _ = body
        level = self._step.sampler.level(batch)
        tail = self._tail(shape.num_draws, level, body)
        yielding = self._send(batch, shape)
        replay_body()
        return partial(self._verified, tail, shape, level) if batch.drafts else lambda: StepTensors(tail(), yielding)

    def _verified(self, tail: Callable[[], SampledTokens], shape: StepShape, level: SamplingLevel) -> StepTensors:
        sampled = tail()
        lengths = self._step.accept(self._verify_rows.first(shape.num_rows), sampled.ids, level)
        return StepTensors(sampled, lengths=lengths)

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Capture every shape, of each kind the largest first: the smaller ones fit into the memory that it took."""
        rows = sorted(self._buckets.draws, reverse=True)
        shapes = [*self._buckets.mixed_shapes(), *self._buckets.verify]
        levels = list(reversed(SamplingLevel))
        total = len(rows) * (1 + len(levels)) + len(shapes)
        done = 0
        for num_rows in rows:
            body = self._body(self._buckets.source(num_rows))
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
        source = self._buckets.source(shape.num_draws)
        if shape != source:
            first = self._body(source)
            if first is None:
                return None
            _, out = first
        bounds = self._bounds(shape)
        if shape.kind == "verify":
            rows, positions = self._verify_rows.first(shape.num_rows), self._rows.first(shape.num_draws)
            draws = SamplePositions(self._numbers[: shape.num_draws], positions.slots, positions.context_len)
            bodies = [partial(step.verify, rows, draws, shape, bounds, out) for step in (self._step, self._short)]
        else:
            rows = self._rows.first(shape.num_rows)
            bodies = [partial(step.body, rows, shape, bounds, out) for step in (self._step, self._short)]
        return self._captured(lambda: bodies[0]().last, shape, bodies[1])

    def _tail(self, num_rows: int, level: SamplingLevel, body: Replay[torch.Tensor]) -> Callable[[], SampledTokens]:
        """Return the tail of all bodies of `num_rows` rows, over the buffer of `body`; eager if it was not captured."""
        key = num_rows, level
        if key not in self._tails:
            _, states = body
            function = partial(self._step.tail, self._rows.first(num_rows), states, level)
            captured = self._captured(function, key)
            self._tails[key] = function if captured is None else partial(_replayed, *captured)
        return self._tails[key]

    def _captured(
        self, function: Callable[[], Tensors], what: object, before: Callable[[], Any] | None = None
    ) -> Replay[Tensors] | None:
        self._sent = None
        for column in (*self._rows, *self._verify_rows):
            # All rows are padding: a call changes no sequence's state.
            column.zero_()
        try:
            return self._capture(function, before)
        except StartupError:
            raise
        except Exception as error:
            # No memory, or (Triton's errors are no RuntimeErrors) no room on this device for a kernel.
            # A lost device raises again when the step is computed.
            _LOG.warning("cannot capture %s: it runs eagerly", what, exc_info=error)
            return None

    def _bounds(self, shape: StepShape) -> Bounds:
        if shape.kind == "decode":
            return Bounds(1, 1, self._step.max_model_len)
        if shape.kind == "verify":
            # A row without drafts has one token.
            return Bounds(shape.num_tokens // shape.num_rows, 1, self._step.max_model_len)
        return Bounds(shape.num_tokens, 2 if shape.num_rows == 1 else 1, self._step.max_model_len)

    def _send(self, batch: Batch, shape: StepShape) -> list[int] | None:
        """Fill the static rows; return the rows that yield, or None if all do."""
        num_rows, surplus = len(batch.slots), (0,) * (shape.num_rows - len(batch.slots))
        # Counts and yields of a decode step are ones.
        sent = shape, batch.slots, () if shape.kind == "decode" else batch.counts
        if shape.kind == "mixed" or sent != self._sent:
            # Set once they are sent: if sending fails, the next step sends again.
            self._sent = None
            columns = [(*column, *surplus) for column in (batch.slots, batch.counts, batch.yields)]
            if shape.kind == "verify":
                self._send_draws(batch, shape, columns)
            else:
                fill_columns(self._columns, columns)
            self._sent = sent
        if shape.kind == "decode":
            return list(range(num_rows)) if surplus else None
        return [row for row, yields in enumerate(batch.yields) if yields]

    def _send_draws(self, batch: Batch, shape: StepShape, columns: Sequence[tuple[int, ...]]) -> None:
        """Fill the rows of a verify step's body with `columns`, and those of its tail."""
        slots = [slot for slot, count in zip(batch.slots, batch.counts, strict=True) for _ in range(count)]
        slots += [0] * (shape.num_draws - len(slots))
        fill_columns(self._verify_columns, columns)
        fill_columns(self._columns[:1], [slots])
        # The tail's rows compute and yield nothing.
        self._columns[1:, : shape.num_draws].zero_()


def _replayed(replay: Callable[[], Any], out: Tensors) -> Tensors:
    replay()
    return out


class CudaCapture:
    """Capture into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(torch.cuda.current_device())

    def __call__(self, function: Callable[[], Tensors], before: Callable[[], Any] | None = None, /) -> Replay[Tensors]:
        # Launch once outside the graph: compiling, loading and allocating at a first call cannot be captured.
        with launching_on(self._stream) as current:
            self._stream.wait_stream(current)
            (before or function)()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL ask for the state of events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = function()
        return graph.replay, out


class CaptureOrRefuse:
    """Capture as `capture` does; if one rank cannot, the start fails on all."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __call__(self, function: Callable[[], Tensors], before: Callable[[], Any] | None = None, /) -> Replay[Tensors]:
        try:
            return self._capture(function, before)
        except Exception as error:
            raise ConfigError(
                f"a CUDA graph cannot be captured, which all ranks need ({type(error).__name__}: {error}); for want of "
                "memory lower --gpu-memory-utilization, or set --enforce-eager",
                field="enforce_eager",
            ) from error


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all captures: the matrix library keeps 32 MiB for each that it multiplied on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
