"""Batch → Pending → StepOutput: applies what changed, prepares inputs, runs body and tail, updates the slot table, copies the ids out.

One code path for CPU and CUDA; nothing here waits for the device except `result`.
"""

from __future__ import annotations

import logging
import time

import torch

from photon_grpc.core.batch import Batch, Fault, StepOutput
from photon_grpc.core.kv import KVGroup
from photon_grpc.errors import InternalFailure, NumericFailure
from photon_grpc.kernels import Kernels
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.inputs import Inputs, prepare
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.sampling.tail import INVALID, Tail
from photon_grpc.runner.slot_table import SlotTable

_LOG = logging.getLogger(__name__)


class ModelRunner:
    """Knows no requests and no text.

    Args:
        decoder: the model, loaded.
        cache: its KV cache.
        kernels: operations of the tail.
        max_num_seqs: slots 1 … max_num_seqs.
        depth: steps that may stay unread when the next is submitted.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, kernels: Kernels, *, max_num_seqs: int, depth: int) -> None:
        self.depth = depth
        self._decoder = decoder
        self._cache = cache
        self._table = SlotTable(max_num_seqs + 1, decoder.max_model_len, cache.block_size, decoder.device)
        self._tail = Tail(self._table, kernels)

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._cache.groups

    @torch.inference_mode()
    def submit(self, batch: Batch) -> Landed | InFlight:
        """Launches one step; what fails is a fault of all its rows.

        Raises torch.AcceleratorError when the device is lost: then nothing in this process can compute any more.
        """
        start_s = time.perf_counter()
        try:
            self._table.apply(batch)
            self._cache.copy(batch.copies)
            ids = self._compute(batch)
        except torch.AcceleratorError:
            raise
        except Exception:
            _LOG.exception("step %d failed", batch.step)
            return Landed(_all_faulty(batch))
        finally:
            self._table.advance(batch)
        if ids.device.type == "cpu":
            return Landed(_output(batch, ids, time.perf_counter() - start_s))
        return InFlight(batch, ids, start_s)

    def close(self) -> None:
        """Waits for what was launched."""
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)

    def _compute(self, batch: Batch) -> torch.Tensor:
        inputs = prepare(batch, self._table, self._cache.pages, self._decoder.attention_scale)
        hidden = self._decoder.forward(inputs.token_ids, inputs.ctx)
        self._table.num_computed[inputs.slots] = inputs.context_len
        if not inputs.last.numel():
            return inputs.last
        return self._draw(batch, inputs, hidden)

    def _draw(self, batch: Batch, inputs: Inputs, hidden: torch.Tensor) -> torch.Tensor:
        slots, context_len = inputs.slots[inputs.drawing], inputs.context_len[inputs.drawing]
        host_slots = [slot for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields]
        logits = self._decoder.logits(hidden[inputs.last])
        ids = self._tail(logits, slots, host_slots, context_len)
        # An invalid id ends its sequence when it is read; until then the table must hold one that can be looked up.
        self._table.token_ids[slots, context_len] = ids.clamp(min=0).int()
        return ids


class Landed:
    """A step that is already computed."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class InFlight:
    """A step on the device: its ids travel to pinned memory behind it."""

    def __init__(self, batch: Batch, ids: torch.Tensor, start_s: float) -> None:
        self._batch = batch
        self._start_s = start_s
        self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        self._ids.copy_(ids, non_blocking=True)
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._landed.record()

    def result(self) -> StepOutput:
        self._landed.synchronize()
        return _output(self._batch, self._ids, time.perf_counter() - self._start_s)


def _output(batch: Batch, ids: torch.Tensor, duration_s: float) -> StepOutput:
    numbers = tuple(ids.tolist())
    if INVALID not in numbers:
        return StepOutput(batch.step, numbers, {}, duration_s)
    rows = [row for row, yields in enumerate(batch.yields) if yields]
    fault = Fault(NumericFailure.reason, "the model gave NaN or infinite logits for this request")
    faults = {row: fault for row, number in zip(rows, numbers, strict=True) if number == INVALID}
    return StepOutput(batch.step, numbers, faults, duration_s)


def _all_faulty(batch: Batch) -> StepOutput:
    fault = Fault(InternalFailure.reason, "the step could not be computed")
    return StepOutput(batch.step, (INVALID,) * sum(batch.yields), dict.fromkeys(range(len(batch.slots)), fault))
