"""The engine process without a model, for tests of what surrounds one: its ids are a function of those before them.

Everything else is real: the bridge, the scheduler, its blocks, quotas, quarantine and traces, heartbeats and counts. It
starts without torch, in a tenth of the time. Constraints and scores are refused or missing.
"""

from __future__ import annotations

import sys
import time
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from photon_grpc import demo
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.sizes import Sizes, decide_sizes
from photon_grpc.core.batch import Admission, Batch, StepOutput
from photon_grpc.core.frames import Facts
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.ports import EnginePorts
from photon_grpc.engine.blocks.allocation import GrowOnDemand
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.blocks.prefix_index import RadixIndex
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs, NoGrammars
from photon_grpc.engine.engine import Engine
from photon_grpc.engine.quotas import NO_QUOTAS, SharedQuotas
from photon_grpc.engine.scheduler.chunking import Chunked
from photon_grpc.engine.scheduler.drafting import NoDrafting
from photon_grpc.engine.scheduler.policy import FairShare, Priority
from photon_grpc.engine.scheduler.quarantine import Quarantine
from photon_grpc.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from photon_grpc.engine.step_trace import JsonlStepTrace
from photon_grpc.engine.trace_file import TraceFile
from photon_grpc.service.processes import engine
from tests.kv_plans import kv_plan

#: About that of a small model, so that a long output outlives what a test does meanwhile.
_STEP_S = 0.002


class _Slot:
    """A running hash of a sequence."""

    def __init__(self, admission: Admission, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._state = admission.output_index
        for token in admission.ids:
            self._take(token)

    def _take(self, token: int) -> None:
        self._state = (self._state * 1_103_515_245 + token + 12_345) % (1 << 31)

    def next_id(self) -> int:
        # The lowest bits of such a state repeat soon.
        token = (self._state >> 8) % self._vocab_size
        self._take(token)
        return token


class _Computed:
    """A step, computed at once."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def drafts(self) -> tuple[int, ...]:
        return ()

    def sample(self, masks: memoryview) -> None:
        raise NotImplementedError("nothing is masked")

    def result(self) -> StepOutput:
        return self._output


class Runner:
    """One id for each row that yields, a while after it was asked."""

    depth = 0

    def __init__(self, plan: KVPlan, num_blocks: int, vocab_size: int) -> None:
        self.kv = plan
        self.num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._slots: dict[int, _Slot] = {}

    def submit(self, batch: Batch) -> _Computed:
        time.sleep(_STEP_S)
        for admission in batch.admissions:
            self._slots[admission.slot] = _Slot(admission, self._vocab_size)
        rows = zip(batch.slots, batch.yields, strict=True)
        ids = tuple(self._slots[slot].next_id() for slot, yields in rows if yields)
        return _Computed(StepOutput(batch.step, ids, duration_s=_STEP_S))

    def close(self) -> None:
        pass


class _Assembled:
    """What `compose.assemble` gives to the engine's process."""

    def __init__(self, config: ServeConfig, model: ModelConfig, sizes: Sizes) -> None:
        self._config = config
        self._sizes = sizes
        self._runner = Runner(
            kv_plan(sizes.block_size, max_chunk=sizes.max_chunk), config.cache.num_blocks or 512, model.vocab_size
        )
        self.facts = self._facts(model)

    def _facts(self, model: ModelConfig) -> Facts:
        sizes, scheduling = self._sizes, self._config.scheduler
        return Facts(
            sizes.max_model_len,
            model.vocab_size,
            self._runner.kv,
            self._runner.num_blocks,
            sizes.max_num_seqs,
            sizes.max_num_batched_tokens,
            scheduling.max_queue_size,
            scheduling.max_queued_tokens,
            "cpu",
            "float32",
            kernels="none",
        )

    def engine(self, ports: EnginePorts, quarantine: Quarantine | None = None) -> Engine:
        runner, sizes, server = self._runner, self._sizes, self._config.server
        pool = BlockPool(runner.kv, runner.num_blocks, RadixIndex(runner.kv), GrowOnDemand())
        limits = SchedulerLimits(sizes.max_num_seqs, sizes.max_num_batched_tokens, 1, Chunked())
        policy = FairShare(Priority()) if server.api_keys_file else Priority()
        constraints = ConstrainedOutputs(NoGrammars(), self.facts.vocab_size)
        scheduler = Scheduler(limits, policy, pool, NoDrafting(), constraints, quarantine)
        quotas = SharedQuotas() if server.api_keys_file and server.frontends > 1 else NO_QUOTAS
        path = self._config.scheduler.step_trace
        trace = JsonlStepTrace(TraceFile(path), self.facts) if path else None
        made = Engine(scheduler, runner, ports, self.facts, quotas, trace)
        made.step_times.stepped(1, _STEP_S)
        return made


def assemble(config: ServeConfig, progress: object, ranks: object) -> _Assembled:
    model = read_model_dir(config.model.model or Path(demo.TARGET))
    return _Assembled(config, model, decide_sizes(model, config, on_cuda=False))


def stand_in(name: str, **contents: object) -> None:
    """For a module that imports torch."""
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def main() -> int:
    stand_in("photon_grpc.compose.assemble", assemble=assemble)
    stand_in("photon_grpc.compose.leading_rank", ranks_of=lambda *_: None)
    stand_in("photon_grpc.kernels.lang.jit", BEFORE_COMPILATION=ContextVar("unused"))
    return engine.main(sys.argv)


if __name__ == "__main__":
    sys.exit(main())
