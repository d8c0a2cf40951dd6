"""The counts of a model's experts, read without waiting for the device."""

from __future__ import annotations

from functools import partial

import torch
from msgspec.structs import replace

from photon_grpc.core.batch import StepOutput
from photon_grpc.core.expert_tally import ExpertTally
from photon_grpc.core.ports import Pending
from photon_grpc.runner.saturation import CountedStep, Saturation

#: Steps between two readings on CUDA.
_EVERY = 16


def watching_experts(tally: torch.Tensor | None, then: Saturation) -> Saturation:
    """Return what adds the counts to the outputs of steps, beside `then`; None: the model has no experts."""
    return then if tally is None else ExpertCounter(tally, then)


class ExpertCounter:
    """The counts that routers keep on the device, int64 [4] of `kernels/moe/route.py`."""

    def __init__(self, tally: torch.Tensor, then: Saturation) -> None:
        self._tally = tally
        self._then = then
        self._is_on_cpu = tally.device.type == "cpu"
        #: Copied to the host after some step: complete once a later step is read.
        self._host = tally if self._is_on_cpu else torch.zeros(4, dtype=torch.int64)

    def watched(self, pending: Pending, step: int) -> Pending:
        pending = self._then.watched(pending, step)
        if self._is_on_cpu:
            return CountedStep(pending, partial(_with_tally, self._host))
        if step % _EVERY:
            return pending
        before, self._host = self._host, torch.empty(4, dtype=torch.int64, pin_memory=True)
        self._host.copy_(self._tally, non_blocking=True)
        return CountedStep(pending, partial(_with_tally, before))


def _with_tally(host: torch.Tensor, output: StepOutput) -> StepOutput:
    return replace(output, experts=ExpertTally(*host.tolist()))
