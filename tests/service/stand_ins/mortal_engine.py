"""The engine process, which dies of one prompt, the ids in MORTAL_TO, as of a kernel that writes where it must not."""

from __future__ import annotations

import os
import sys

from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Pending
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.service import engine

_POISON = tuple(map(int, os.environ["MORTAL_TO"].split()))
_submit = ModelRunner.submit


def submit_or_die(runner: ModelRunner, batch: Batch) -> Pending:
    if any(admission.ids[: admission.num_prompt] == _POISON for admission in batch.admissions):
        os.abort()
    return _submit(runner, batch)


ModelRunner.submit = submit_or_die  # type: ignore[method-assign]
sys.exit(engine.main(sys.argv))
