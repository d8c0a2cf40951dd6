"""The engine process, which dies of one prompt, the ids in MORTAL_TO, as of a kernel that writes where it must not.

Of the ids in OUT_OF_MEMORY_BY it fails the step, for want of memory on the device.
"""

from __future__ import annotations

import os
import sys

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Pending
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.service.processes import engine


def admits(batch: Batch, name: str) -> bool:
    poison = tuple(map(int, os.environ[name].split()))
    return any(admission.ids[: admission.num_prompt] == poison for admission in batch.admissions)


_submit, _apply = ModelRunner.submit, SlotTable.apply


def submit_or_die(runner: ModelRunner, batch: Batch) -> Pending:
    if admits(batch, "MORTAL_TO"):
        os.abort()
    return _submit(runner, batch)


def apply_or_fail(table: SlotTable, batch: Batch) -> None:
    if admits(batch, "OUT_OF_MEMORY_BY"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    _apply(table, batch)


ModelRunner.submit = submit_or_die  # type: ignore[method-assign]
SlotTable.apply = apply_or_fail  # type: ignore[method-assign]
sys.exit(engine.main(sys.argv))
