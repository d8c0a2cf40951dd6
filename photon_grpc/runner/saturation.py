"""The count of keys and values beyond the range of pages of 8 bits, read without waiting for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from msgspec.structs import replace

from photon_grpc.core.batch import StepOutput
from photon_grpc.core.ports import Pending

_LOG = logging.getLogger(__name__)

#: Steps between two readings on CUDA.
_EVERY = 64
#: The count is logged when it has grown by this factor.
_FACTOR = 10


class Saturation(Protocol):
    """Adds the count to the outputs of steps."""

    def watched(self, pending: Pending, step: int) -> Pending: ...


class NoSaturation:
    """Pages in the type of the layers, where nothing is clipped."""

    def watched(self, pending: Pending, step: int) -> Pending:
        return pending


NO_SATURATION = NoSaturation()


def saturation_of(counted: torch.Tensor | None) -> Saturation:
    """Return the reader of the count of a decoder's 8-bit pages; `None`: the pages have no count."""
    return NO_SATURATION if counted is None else SaturationCount(counted)


class SaturationCount:
    """The count that kernels keep on the device, int64 [1]."""

    def __init__(self, counted: torch.Tensor) -> None:
        self._counted = counted
        #: Copied to the host after some step: complete once a later step is read.
        self._host = counted if counted.device.type == "cpu" else torch.zeros(1, dtype=torch.int64)
        self._told = 0

    def watched(self, pending: Pending, step: int) -> Pending:
        if self._counted.device.type == "cpu":
            return CountedStep(pending, partial(self._with_count, self._host))
        if step % _EVERY:
            return pending
        before, self._host = self._host, torch.empty(1, dtype=torch.int64, pin_memory=True)
        self._host.copy_(self._counted, non_blocking=True)
        return CountedStep(pending, partial(self._with_count, before))

    def _with_count(self, host: torch.Tensor, output: StepOutput) -> StepOutput:
        count = int(host)
        if count >= max(1, _FACTOR * self._told):
            self._told = count
            _LOG.warning(
                "%s numbers of keys and values were beyond the range of the 8-bit KV cache so far, and were clipped: "
                "photon-grpc calibrate finds scales for --kv-calibration",
                f"{count:,}",
            )
        return replace(output, num_saturated=count)


class CountedStep:
    """A step whose output gets counts once it is read: what `add_counts` returns of it."""

    def __init__(self, pending: Pending, add_counts: Callable[[StepOutput], StepOutput]) -> None:
        self._pending = pending
        self._add_counts = add_counts

    def drafts(self) -> tuple[int, ...]:
        return self._pending.drafts()

    def sample(self, masks: memoryview) -> None:
        self._pending.sample(masks)

    def result(self) -> StepOutput:
        return self._add_counts(self._pending.result())
