"""Batch → Pending → StepOutput: applies what changed, has the step computed, copies the ids out.

One code path for CPU and CUDA; nothing here waits for the device except `result`.
"""

from __future__ import annotations

import gc
import logging
import time

import torch

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.fault import Fault
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.ports import Pending
from photon_grpc.errors import InternalFailure, NumericFailure
from photon_grpc.kernels.sampling.draw import INVALID
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.poisoned_slots import PoisonedSlots, SoundRows
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Launch, SampledTokens

_LOG = logging.getLogger(__name__)


class ModelRunner:
    """Knows no requests and no text.

    Args:
        launch: computes a batch.
        table: the slots that batches speak of.
        cache: the pages that their blocks are.
        depth: steps that may stay unread when the next is submitted.
    """

    def __init__(self, launch: Launch, table: SlotTable, cache: KVCache, *, depth: int) -> None:
        self.depth = depth
        self._launch_body = launch
        self._table = table
        self._cache = cache
        self._poisoned = PoisonedSlots()

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def kv(self) -> KVPlan:
        return self._cache.plan

    @torch.inference_mode()
    def submit(self, batch: Batch) -> Pending:
        """Launches one step; what fails is a fault of all its rows, and of theirs in the steps that are launched before it is read.

        Raises torch.AcceleratorError when the device is lost: then nothing in this process can compute any more.
        """
        sound = self._poisoned.sound(batch)
        pending = self._launch(sound)
        return pending if sound is batch else SoundRows(pending, batch, sound)

    def _launch(self, batch: Batch) -> Pending:
        start_s = time.perf_counter()
        try:
            self._table.apply(batch)
            self._cache.copy(batch.copies)
            if not batch.slots:
                return Landed(StepOutput(batch.step, ()))
            drawn = self._launch_body(batch)()
            if drawn.ids.device.type == "cuda":
                return InFlight(batch, drawn, start_s)
        except torch.AcceleratorError:
            raise
        except Exception:
            _LOG.exception("step %d failed", batch.step)
            self._poisoned.failed(batch)
            return Landed(_all_faulty(batch))
        finally:
            self._table.advance(batch)
        return Landed(_output(batch, drawn.ids, drawn.rows, time.perf_counter() - start_s))

    def close(self) -> None:
        """Waits for what was launched."""
        if self._table.device.type == "cuda":
            torch.cuda.synchronize(self._table.device)


class Landed:
    """A step that is already computed, or cannot be."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def drafts(self) -> tuple[int, ...]:
        return ()

    def sample(self, masks: memoryview) -> None:
        """Does nothing: nothing is held back."""

    def result(self) -> StepOutput:
        return self._output


class InFlight:
    """A step on the device: its ids travel to pinned memory behind it."""

    def __init__(self, batch: Batch, drawn: SampledTokens, start_s: float) -> None:
        self._batch = batch
        self._rows = drawn.rows
        self._start_s = start_s
        self._ids = torch.empty(drawn.ids.shape, dtype=drawn.ids.dtype, pin_memory=True)
        self._ids.copy_(drawn.ids, non_blocking=True)
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._landed.record()

    def drafts(self) -> tuple[int, ...]:
        return ()

    def sample(self, masks: memoryview) -> None:
        """Does nothing: nothing is held back."""

    def result(self) -> StepOutput:
        self._landed.synchronize()
        return _output(self._batch, self._ids, self._rows, time.perf_counter() - self._start_s)


def free_unused() -> None:
    """Gives the device the memory that nothing in this process refers to any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _output(batch: Batch, ids: torch.Tensor, wanted: list[int] | None, duration_s: float) -> StepOutput:
    drawn = ids.tolist()
    numbers = tuple(drawn) if wanted is None else tuple([drawn[row] for row in wanted])
    if INVALID not in numbers:
        return StepOutput(batch.step, numbers, {}, duration_s)
    rows = [row for row, yields in enumerate(batch.yields) if yields]
    fault = Fault.of(NumericFailure("the model gave NaN or infinite logits for this request"))
    faults = {row: fault for row, number in zip(rows, numbers, strict=True) if number == INVALID}
    return StepOutput(batch.step, numbers, faults, duration_s)


def _all_faulty(batch: Batch) -> StepOutput:
    fault = Fault.of(InternalFailure("the step could not be computed"))
    return StepOutput(batch.step, (INVALID,) * sum(batch.yields), dict.fromkeys(range(len(batch.slots)), fault))
