"""An engine over a fake runner, and what came out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle

from hypothesis import strategies as st

from photon_grpc.core.fault import Fault
from photon_grpc.core.frames import Abort, Add, Facts, Finished, StepFrame
from photon_grpc.core.logprobs import RECORD
from photon_grpc.core.ports import EnginePorts
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.allocation import GrowOnDemand
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.blocks.contiguous import ReserveContext
from photon_grpc.engine.blocks.prefix_index import NoPrefixIndex, RadixIndex
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs
from photon_grpc.engine.engine import Engine
from photon_grpc.engine.quotas import NO_QUOTAS, NoQuotas
from photon_grpc.engine.scheduler.chunking import Chunked, Unchunked
from photon_grpc.engine.scheduler.drafting import NoDrafting
from photon_grpc.engine.scheduler.policy import POLICIES, FairShare
from photon_grpc.engine.scheduler.quarantine import Quarantine
from photon_grpc.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.engine.fakes import VOCAB, FakeBridge, FakeRecorder, FakeRunner
from tests.engine.tables import Table, TableGrammars
from tests.kv_plans import kv_plan

#: Of the KVGroups of a Setting that does not say; 0 attends everything.
default_windows: tuple[int, ...] = (0,)


@dataclass
class Setting:
    #: For each KVGroup.
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    chunked: bool = True
    prefix_caching: bool = True
    contiguous: bool = False
    policy: str = "priority"
    fair: bool = False
    depth: int = 0
    #: k of one step after the other, over and over.
    drafts: tuple[int, ...] = (0,)
    max_model_len: int = 256
    max_queue_size: int = 1024
    max_queued_tokens: int = 1 << 20
    windows: tuple[int, ...] = field(default_factory=lambda: default_windows)
    #: Nothing here sleeps, so the Load is told after every step that changed it.
    load_interval_s: float = 0.0
    #: For all KVGroups together, where it is said.
    total_blocks: int = 0


#: Drawn by properties: one group and two, windows that end within a block and with one, and no group that attends
#: everything.
windows = st.sampled_from([(0,), (0, 5), (0, 1), (0, 8), (7,)])


@dataclass
class Outcome:
    ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    failed: Fault | None = None
    num_preemptions: int = 0
    #: Packed.
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""


class CyclicDrafting(NoDrafting):
    def __init__(self, drafts: tuple[int, ...]) -> None:
        self._drafts = cycle(drafts)

    def num_drafts(self, num_running: int, has_prompts: Callable[[], bool]) -> int:
        return next(self._drafts)

    def of(self, seq: Sequence, k: int) -> int:
        return k


class Harness:
    def __init__(
        self,
        setting: Setting | None = None,
        quotas: NoQuotas | None = None,
        in_flight: Mapping[bytes, int] | None = None,
        known: bytes = b"",
    ) -> None:
        """`in_flight` and `known`: what an engine before this one left; unset: this one knows no others."""
        self.setting = s = setting or Setting()
        # A run of blocks for the whole context is not for windows.
        max_chunk = s.max_num_batched_tokens if s.chunked else s.max_model_len
        plan = kv_plan(s.block_size, *(() if s.contiguous else s.windows), max_chunk=max_chunk)
        self.num_groups = len(plan.groups)
        num_blocks = s.total_blocks or s.num_blocks * self.num_groups
        self.runner = FakeRunner(plan, num_blocks, s.depth)
        index = RadixIndex(plan) if s.prefix_caching and not s.contiguous else NoPrefixIndex()
        self.pool = BlockPool(plan, num_blocks, index, ReserveContext() if s.contiguous else GrowOnDemand())
        chunking = Chunked() if s.chunked else Unchunked()
        limits = SchedulerLimits(s.max_num_seqs, s.max_num_batched_tokens, max(s.depth, 1), chunking)
        self.grammars = TableGrammars()
        constraints, drafting = ConstrainedOutputs(self.grammars, VOCAB), CyclicDrafting(s.drafts)
        self.post = FakeBridge()
        self.recorder = FakeRecorder()
        quarantine = None if in_flight is None else Quarantine(self.recorder, self.post.wake, in_flight, known)
        policy = FairShare(POLICIES[s.policy]()) if s.fair else POLICIES[s.policy]()
        self.scheduler = Scheduler(limits, policy, self.pool, drafting, constraints, quarantine)
        facts = Facts(
            s.max_model_len,
            97,
            plan,
            num_blocks,
            s.max_num_seqs,
            s.max_num_batched_tokens,
            s.max_queue_size,
            s.max_queued_tokens,
            "cpu",
            "float32",
        )
        self.facts = facts
        ports = EnginePorts(self.post, self.post, self.post, s.load_interval_s)
        self.engine = Engine(self.scheduler, self.runner, ports, facts, quotas or NO_QUOTAS)
        self.outcomes: dict[int, Outcome] = {}
        #: Handle of an output whose request scores its prompt -> (the first output's, bytes of the whole prompt's).
        self._prompt_bytes: dict[int, tuple[int, int]] = {}
        self._handles = 0
        self._read = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        num_outputs: int = 1,
        seed: int = 0,
        stop: tuple[int, ...] = (),
        min_tokens: int = 0,
        table: Table | None = None,
        **more: object,
    ) -> int:
        handle = self._handles
        self._handles += num_outputs
        request_id = str(more.pop("request_id", f"r{handle}"))
        if table is not None:
            self.grammars.tables[request_id] = self.runner.tables[seed] = table
        request = Request(
            request_id=request_id,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(seed=seed),
            stop=StopParams(max_tokens, min_tokens=min_tokens, stop_token_ids=stop),
            arrival_s=float(more.pop("arrival_s", time.monotonic())),  # type: ignore[arg-type]
            num_outputs=num_outputs,
            **more,  # type: ignore[arg-type]
        )
        num_bytes = (len(prompt) - 1) * request.logprobs.num_prompt_records * RECORD.size
        for index in range(num_outputs):
            self.outcomes[handle + index] = Outcome()
            if num_bytes:
                self._prompt_bytes[handle + index] = (handle, num_bytes)
        self.post.put(Add(handle, request))
        return handle

    def abort(self, *handles: int) -> None:
        self.post.put(Abort(handles))

    def step(self) -> None:
        self.engine.step()
        self.pool.check()
        for seq, matcher in self.scheduler.live.constraints.matchers.items():
            assert matcher.ids == seq.ids[seq.num_prompt :], "a matcher is not where its output is"
        self._collect()

    def run(self, max_steps: int = 20_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            try:
                self.step()
            except EOFError:
                return
            assert self.post.waits[-1] is None or self.post.waits[-1] <= 0.0 or not self.scheduler.live.has_work(), (
                "the engine spins"
            )
        raise AssertionError("the engine does not come to rest")

    def idle(self) -> bool:
        """Return whether nothing is held but what the prefix index knows."""
        pool, scheduler = self.pool, self.scheduler
        return not (
            pool.num_owned
            or pool.num_limbo
            or len(self.engine._admission)
            or scheduler.live.has_work()
            or scheduler.live.num_queued
            or scheduler.live.siblings.num_seqs
            or scheduler.live.constraints.matchers
            or scheduler.live.prompt_scoring.unscored
            or scheduler._read_blocks
            or scheduler.live.isolation.seqs
            or self.recorder.in_flight()
            or scheduler._flying
        )

    def _collect(self) -> None:
        for _, frame in self.post.sent[self._read :]:
            if not isinstance(frame, StepFrame):
                continue
            for handle, records in frame.prompt_logprobs.items():
                assert not self.outcomes[handle].ids, "prompt scores came behind an id"
                self.outcomes[handle].prompt_logprobs += records
            for handle, token in zip(frame.handles, frame.ids, strict=True):
                self.outcomes[handle].ids.append(token)
            for handle, records in frame.logprobs.items():
                self.outcomes[handle].logprobs += records
            for handle in frame.preempted:
                self.outcomes[handle].num_preemptions += 1
            for finished in frame.finished:
                self.outcomes[finished.handle].finished = finished
            for failed in frame.failed:
                self.outcomes[failed.handle].failed = failed.fault
            for handle in self._prompt_bytes.keys() & set(frame.handles):
                first, num_bytes = self._prompt_bytes[handle]
                leader = self.outcomes[first]
                assert leader.failed or len(leader.prompt_logprobs) == num_bytes, (
                    "an id came before the prompt's scores"
                )
        self._read = len(self.post.sent)
