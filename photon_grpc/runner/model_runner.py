"""Batch → Pending → StepOutput: changes are applied, the step is launched, ids and log-probabilities are copied out.

There is one code path for CPU and CUDA. On CUDA only `result`, `close` and a failed launch wait for the device; a CPU
has computed what `submit` or `sample` returns.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from photon_grpc.core.batch import FAULTS, NAN_LOGITS, Batch, StepOutput
from photon_grpc.core.fault import Fault
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.ports import Pending
from photon_grpc.errors import InternalFailure
from photon_grpc.kernels.lang.streams import stream_of
from photon_grpc.runner.drafting import Drafter, NoDrafter
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.logprob_records import LogprobRecords, output_records
from photon_grpc.runner.poisoned_slots import PoisonedSlots, UnpoisonedRows
from photon_grpc.runner.saturation import NO_SATURATION, Saturation
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Launch, StepTensors, Tail

_LOG = logging.getLogger(__name__)

#: Records of outputs and of prompts.
StepRecords = tuple[LogprobRecords, LogprobRecords]


class ModelRunner:
    """The runner of a model; it knows neither requests nor text.

    Args:
        launch: computes a batch.
        table: the slots of batches.
        cache: the pages of their blocks.
        depth: steps that may stay unread when the next is submitted.
        drafter: makes the drafts of steps that have some.
        saturation: reads what pages of 8 bits could not hold.
    """

    def __init__(
        self, launch: Launch, table: SlotTable, cache: KVCache, *, depth: int, drafter: Drafter | None = None,
        saturation: Saturation = NO_SATURATION,
    ) -> None:  # fmt: skip
        self.depth = depth
        self.drafter = drafter or NoDrafter()
        self.launch_body = launch
        self.table = table
        self.cache = cache
        self._poisoned = PoisonedSlots()
        self._saturation = saturation
        self._awaits_masks = False
        #: Launches that failed.
        self.num_failures = 0

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def kv(self) -> KVPlan:
        return self.cache.plan

    @torch.inference_mode()
    def submit(self, batch: Batch) -> Pending:
        """Launch one step; a failure faults all its rows, also in steps that are launched before it is read.

        Raise torch.AcceleratorError if the device is lost: then this process can compute nothing more. Raise
        InternalFailure while the step before waits for its masks, and for more drafts than the drafter makes.
        """
        if self._awaits_masks:
            raise InternalFailure(f"step {batch.step} is submitted before the masks of the step before it")
        if batch.drafts > self.drafter.max_drafts:
            raise InternalFailure(
                f"step {batch.step} has {batch.drafts} drafts a row, the runner makes {self.drafter.max_drafts}"
            )
        unpoisoned = self._poisoned.unpoisoned(batch)
        pending = self._launch(unpoisoned)
        pending = pending if unpoisoned is batch else UnpoisonedRows(pending, batch, unpoisoned)
        return self._saturation.watched(pending, batch.step)

    def _launch(self, batch: Batch) -> Pending:
        start_s = time.perf_counter()
        try:
            self.table.apply(batch)
            self.cache.copy(batch.copies)
            if not batch.slots:
                return FinishedStep(StepOutput(batch.step, ()))
            drafts = self._drafted(batch)
            tail = self.launch_body(batch)
            self.drafter.ingest(batch)
            if not batch.masked:
                return self._sent(batch, tail(), start_s)
        except torch.AcceleratorError:
            raise
        except Exception:
            return self._failed(batch)
        finally:
            self.table.advance(batch)
        self._awaits_masks = True
        return MaskedStep(partial(self._sample, batch, tail, start_s), drafts)

    def _drafted(self, batch: Batch) -> DraftCopy | None:
        """Make the drafts of a step; return those of masked rows, which are being copied to the host."""
        if not batch.drafts:
            return None
        self.drafter.draft(batch)
        if batch.given:
            self.table.give(batch.given)
        return DraftCopy(batch, self.table) if batch.masked else None

    @torch.inference_mode()
    def _sample(self, batch: Batch, tail: Tail, start_s: float, masks: memoryview) -> Pending:
        self._awaits_masks = False
        try:
            self.table.mask(masks)
            return self._sent(batch, tail(), start_s)
        except torch.AcceleratorError:
            raise
        except Exception:
            return self._failed(batch)

    def _sent(self, batch: Batch, tensors: StepTensors, start_s: float) -> Pending:
        """Return a step whose results are being copied from the device; on a CPU it is already finished."""
        ids, logprobs = tensors.sampled
        records = output_records(logprobs, batch, self.table.logprob_params), tensors.prompts
        read = partial(self._read, batch, tensors.rows)
        if ids.device.type == "cuda":
            return StepInFlight(read, ids, tensors.lengths, records, start_s)
        return FinishedStep(read(ids, tensors.lengths, records, time.perf_counter() - start_s))

    def _read(
        self,
        batch: Batch,
        yielding: list[int] | None,
        ids: torch.Tensor,
        lengths: torch.Tensor | None,
        records: StepRecords,
        duration_s: float,
    ) -> StepOutput:
        """Return the output of a step whose results are on the host."""
        if lengths is None:
            return _output(batch, ids, yielding, records, duration_s)
        output = _verified(batch, ids, lengths, records, duration_s)
        self.table.read(batch, output.lengths)
        return output

    def _failed(self, batch: Batch) -> Pending:
        """Return a step that failed with the exception being handled.

        Raise torch.AcceleratorError if the device is lost, which a launch of Triton's reports by a RuntimeError.
        """
        self.num_failures += 1
        wait_for(self.table.device)
        _LOG.exception("step %d failed", batch.step)
        self._poisoned.failed(batch)
        return FinishedStep(_all_faulty(batch))

    def close(self) -> None:
        """Wait until everything launched has finished."""
        wait_for(self.table.device)


def wait_for(device: torch.device) -> None:
    """Wait until everything launched has finished. Raise torch.AcceleratorError if the device is lost."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DraftCopy:
    """The drafts of a step's masked rows, copied to the host while its body runs."""

    def __init__(self, batch: Batch, table: SlotTable) -> None:
        self._counts = [batch.yields[row] - 1 for row in batch.masked]
        drafts = table.drafts([batch.slots[row] for row in batch.masked], batch.drafts)
        self._drafts, self._landed = drafts, None
        if drafts.device.type == "cuda":
            self._drafts = _to_host(drafts)
            self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._landed.record(stream_of(drafts.device))

    def read(self) -> tuple[int, ...]:
        """Wait for the drafts; return those of each row, filled up with -1."""
        if self._landed is not None:
            self._landed.synchronize()
        return tuple(
            draft if at < count else -1
            for row, count in zip(self._drafts.tolist(), self._counts, strict=True)
            for at, draft in enumerate(row)
        )


class LaunchedStep:
    """A step whose body and tail are launched; no mask depends on its drafts."""

    def drafts(self) -> tuple[int, ...]:
        return ()

    def sample(self, masks: memoryview) -> None:
        """Do nothing."""


class MaskedStep(LaunchedStep):
    """A step whose tail waits for masks.

    Args:
        sample: launches the tail.
        drafts: of the masked rows, if the step has drafts.
    """

    def __init__(self, sample: Callable[[memoryview], Pending], drafts: DraftCopy | None = None) -> None:
        self._sample = sample
        self._drafts = drafts
        self._pending: Pending | None = None

    def drafts(self) -> tuple[int, ...]:
        return () if self._drafts is None else self._drafts.read()

    def sample(self, masks: memoryview) -> None:
        self._pending = self._sample(masks)

    def result(self) -> StepOutput:
        if self._pending is None:
            raise InternalFailure("the result of a step was requested before its masks were given")
        return self._pending.result()


class FinishedStep(LaunchedStep):
    """A step that is already computed or has failed."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class StepInFlight(LaunchedStep):
    """A step on the device, whose ids, their numbers and log-probabilities are copied to pinned memory after it.

    Args:
        read: makes the output of what is on the host, and of the seconds that it took.
    """

    def __init__(
        self,
        read: Callable[[torch.Tensor, torch.Tensor | None, StepRecords, float], StepOutput],
        ids: torch.Tensor,
        lengths: torch.Tensor | None,
        records: StepRecords,
        start_s: float,
    ) -> None:
        self._read = read
        self._start_s = start_s
        self._ids = _to_host(ids)
        self._lengths = None if lengths is None else _to_host(lengths)
        of_outputs, of_prompts = (
            each._replace(records=_to_host(each.records)) if each.spans else each for each in records
        )
        self._records = of_outputs, of_prompts
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._landed.record(stream_of(ids.device))

    def result(self) -> StepOutput:
        self._landed.synchronize()
        return self._read(self._ids, self._lengths, self._records, time.perf_counter() - self._start_s)


def free_unused() -> None:
    """Return the memory that nothing in this process refers to any more to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to pinned memory, complete once all launches before have ended."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _output(
    batch: Batch, ids: torch.Tensor, yielding: list[int] | None, records: StepRecords, duration_s: float
) -> StepOutput:
    of_all_rows = ids.tolist()
    numbers = tuple(of_all_rows) if yielding is None else tuple([of_all_rows[row] for row in yielding])
    faults: dict[int, Fault] = {}
    if numbers and min(numbers) < 0:
        rows = [row for row, yields in enumerate(batch.yields) if yields]
        faults = {row: FAULTS[number] for row, number in zip(rows, numbers, strict=True) if number < 0}
    scores, prompt_scores = (each.cut(faults) for each in records)
    return StepOutput(batch.step, numbers, faults, duration_s, logprobs=scores, prompt_logprobs=prompt_scores)


def _verified(
    batch: Batch, ids: torch.Tensor, lengths: torch.Tensor, records: StepRecords, duration_s: float
) -> StepOutput:
    """Return the output of a step with drafts, whose `ids` are those of its draws and `lengths` those of its rows."""
    sampled, numbers = ids.tolist(), lengths.tolist()
    kept: dict[int, list[int]] = {}
    start = 0
    for row, yields in enumerate(batch.yields):
        if yields:
            kept[row] = sampled[start : start + numbers[row]]
            start += yields
    # A dry run, whose kernels compute nothing, keeps nothing.
    faults = {row: FAULTS[mine[0]] for row, mine in kept.items() if mine and mine[0] < 0}
    sizes = {row: len(mine) for row, mine in kept.items()}
    of_outputs, of_prompts = records
    return StepOutput(
        batch.step,
        tuple(token for mine in kept.values() for token in mine),
        faults,
        duration_s,
        tuple(sizes.values()),
        logprobs=of_outputs.kept(sizes).cut(faults),
        prompt_logprobs=of_prompts.cut(faults),
    )


def _all_faulty(batch: Batch) -> StepOutput:
    fault = Fault.of(InternalFailure("the step could not be computed"))
    return StepOutput(batch.step, (NAN_LOGITS,) * sum(batch.yields), dict.fromkeys(range(len(batch.slots)), fault))
