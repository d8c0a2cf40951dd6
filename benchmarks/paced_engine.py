"""`photon-grpc serve` whose engine has the real scheduler and bridge but no model: its steps take an H200's time.

A machine without a GPU so shows what the front ends carry: `python -m benchmarks.serve --paced`.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial

from photon_grpc.cli import main as cli
from photon_grpc.compose import assemble
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.sizes import Sizes
from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.frames import Facts
from photon_grpc.core.kv import KVGroup, KVPlan, PageFormat, Section
from photon_grpc.runner.start import OnStage
from photon_grpc.service import supervisor
from photon_grpc.service.processes import engine

_BLOCK_SIZE, _NUM_BLOCKS, _MAX_LEN, _VOCAB_SIZE = 16, 1 << 15, 4096, 128256
_PLAN = KVPlan((KVGroup((Section(PageFormat(1, 1, "float32"), (0,)),)),), _BLOCK_SIZE)
_SIZES = Sizes(_MAX_LEN, _BLOCK_SIZE, 256, 8192, 8192, 1)
#: Of Llama-3.2-1B on an H200: a step of one row, each further row, each prompt token.
_STEP_S, _ROW_S, _PROMPT_S = 0.7e-3, 5.3e-6, 4e-6


class _Step:
    """A step in flight, which ends at `ends_s`."""

    def __init__(self, batch: Batch, ids: tuple[int, ...], ends_s: float) -> None:
        self._output = StepOutput(batch.step, ids)
        self._ends_s = ends_s

    def drafts(self) -> tuple[int, ...]:
        return ()

    def sample(self, masks: memoryview) -> None:
        pass

    def result(self) -> StepOutput:
        time.sleep(max(self._ends_s - time.perf_counter(), 0.0))
        return self._output


class PacedRunner:
    """A runner that samples random words and takes time, one step after another."""

    kv, num_blocks, depth = _PLAN, _NUM_BLOCKS, 1

    def __init__(self) -> None:
        self._draw = random.Random(7)
        self._ends_s = 0.0

    def submit(self, batch: Batch) -> _Step:
        num_rows, num_ids = len(batch.slots), sum(batch.yields)
        took_s = _STEP_S + num_rows * _ROW_S + (sum(batch.counts) - num_rows) * _PROMPT_S
        self._ends_s = max(self._ends_s, time.perf_counter()) + took_s
        # Neither bytes nor special tokens.
        ids = tuple(self._draw.choices(range(256, _VOCAB_SIZE - 256), k=num_ids))
        return _Step(batch, ids, self._ends_s)

    def close(self) -> None:
        pass


def paced(config: ServeConfig, progress: OnStage) -> assemble.Assembled:
    facts = Facts(
        max_model_len=_MAX_LEN,
        vocab_size=_VOCAB_SIZE,
        kv=_PLAN,
        num_blocks=_NUM_BLOCKS - 1,
        max_num_seqs=_SIZES.max_num_seqs,
        max_num_batched_tokens=_SIZES.max_num_batched_tokens,
        max_queue_size=1024,
        max_queued_tokens=1 << 30,
        device="none",
        dtype="none",
    )
    return assemble.Assembled(facts, config, _SIZES, PacedRunner(), _STEP_S, None)


def main() -> int:
    if sys.argv[1] == "serve":
        supervisor.Supervisor = partial(supervisor.Supervisor, engine="benchmarks.paced_engine")  # type: ignore[assignment,misc]
        return cli.main()
    assemble.assemble = paced
    return engine.main(sys.argv)


if __name__ == "__main__":
    sys.exit(main())
