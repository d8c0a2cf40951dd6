"""The engine process without a model, which dies of one prompt, the ids in MORTAL_TO."""

from __future__ import annotations

import os
import sys

from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Pending
from tests.service.modelless.engine import Runner, main

_POISON = tuple(map(int, os.environ["MORTAL_TO"].split()))
_submit = Runner.submit


def submit_or_die(runner: Runner, batch: Batch) -> Pending:
    if any(admission.ids[: admission.num_prompt] == _POISON for admission in batch.admissions):
        os.abort()
    return _submit(runner, batch)


Runner.submit = submit_or_die  # type: ignore[method-assign,assignment]
sys.exit(main())
