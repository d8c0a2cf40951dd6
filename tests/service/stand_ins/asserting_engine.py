"""An engine process in which a kernel reads out of bounds before the step that takes the ids of ASSERT_BY.

The assert shows when the step is read; this process then has lost the device.
"""

from __future__ import annotations

import os
import sys

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Pending
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.service.processes import engine

_POISON = tuple(map(int, os.environ["ASSERT_BY"].split()))
_submit = ModelRunner.submit


def submit_behind_an_assert(runner: ModelRunner, batch: Batch) -> Pending:
    if any(admission.ids[: admission.num_prompt] == _POISON for admission in batch.admissions):
        device = runner.table.device
        torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)]
    return _submit(runner, batch)


ModelRunner.submit = submit_behind_an_assert  # type: ignore[method-assign]
sys.exit(engine.main(sys.argv))
