"""An engine over a loaded model under the limits of one scenario, and what it computed for every request.

The engine, its scheduler, block pool and prefix index are new for every scenario; weights, pages and graphs are those
of the loaded model. So a scenario may have fewer blocks, rows and tokens a step than the model was loaded for.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import defaultdict
from collections.abc import Sequence as Columns
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from benchmarks.bits.requests import Drawn, request_of
from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.compose.assemble import Assembled
from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.frames import Add, Down, StepFrame, Up
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.logprobs import NO_LOGPROBS
from photon_grpc.core.ports import EnginePorts, Event, Pending, Runner
from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Sequence
from photon_grpc.core.stats import Load
from photon_grpc.engine.blocks.allocation import GrowOnDemand
from photon_grpc.engine.scheduler.drafting import NoDrafting
from photon_grpc.engine.scheduler.scheduler import Scheduler
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder


@dataclass(frozen=True)
class Scenario:
    """Limits of an engine, and how requests arrive."""

    name: str
    #: Outputs at a time that arrivals aim at; drawn anew, up to this, every few steps.
    company: int = 300
    max_num_batched_tokens: int = 8192
    #: The blocks in use hold so many of the longest request; None: all blocks of the model.
    kv_requests: float | None = None
    #: No block is left free for outputs to grow, so that they preempt each other.
    crowded: bool = False
    prefix_caching: bool = False
    contiguous: bool = False
    policy: str = "priority"
    #: "plain": only requests that ask for nothing; "processed": only others; "all": all of them, mixed.
    only: str = "all"
    #: How often the requests are sent one after another; the second time finds what the first left in the cache.
    passes: int = 1
    #: Of every request: continue at this many random ids of its output; -1: at every id.
    continuations: int = 0
    #: Share of the requests that take part.
    share: float = 1.0
    #: Whether steps draft, of a model that was loaded with a drafter.
    may_draft: bool = True


class Computed(NamedTuple):
    """A step's part that computed one or more tokens of an output."""

    step: int
    first: int
    count: int


class StepSize(NamedTuple):
    rows: int
    tokens: int
    #: Rows that compute several tokens.
    chunks: int
    #: No row asks for more than a temperature, so that the head's kernel draws.
    is_plain: bool


@dataclass
class Outcome:
    """One output: what came, and how it was computed."""

    index: int
    output: int
    #: Ids that were given, of a continuation.
    num_continued: int = 0
    ids: list[int] = field(default_factory=list)
    records: bytes = b""
    prompt_records: bytes = b""
    finish: str = ""
    num_cached: int = 0
    num_preempted: int = 0
    steps: list[Computed] = field(default_factory=list)


class Confined:
    """A runner of which an engine may use only the first blocks."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self._runner = runner
        self.num_blocks = min(num_blocks, runner.num_blocks)

    @property
    def kv(self) -> KVPlan:
        return self._runner.kv

    @property
    def depth(self) -> int:
        return self._runner.depth

    def submit(self, batch: Batch) -> Pending:
        return self._runner.submit(batch)

    def close(self) -> None:
        """Leave the model loaded."""


class Crowded(GrowOnDemand):
    """Admits a sequence wherever its ids fit."""

    def headroom(self, num_running: int) -> int:
        return 0


class Recorder:
    """Notes the size of every step and where every token was computed; a StepTrace."""

    def __init__(self) -> None:
        self.sizes: list[StepSize] = []
        self.computed: defaultdict[int, list[Computed]] = defaultdict(list)
        #: Of every handle.
        self._is_plain: dict[int, bool] = {}

    def launching(self, batch: Batch, rows: Columns[Sequence]) -> None:
        for seq in rows:
            if seq.handle not in self._is_plain:
                self._is_plain[seq.handle] = _is_plain(seq.request)
        plain = all(self._is_plain[seq.handle] for seq in rows)
        self.sizes.append(StepSize(len(rows), sum(batch.counts), sum(count > 1 for count in batch.counts), plain))
        for seq, count in zip(rows, batch.counts, strict=True):
            first = seq.num_computed - count + sum(flight.computes for flight in seq.flights)
            self.computed[seq.handle].append(Computed(len(self.sizes) - 1, first, count))

    def settled(self, output: StepOutput) -> None:
        """Do nothing."""

    def aborted(self, seq: Sequence, by_stop_string: bool) -> None:
        """Do nothing."""

    def turned(self, report: StepFrameBuilder, scheduler: Scheduler) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Company:
    """Both ends of the bridge of one scenario's engine."""

    def __init__(self, assembled: Assembled, scenario: Scenario, max_tokens: int, seed: int) -> None:
        """Make the engine; `max_tokens` are those of the longest request with its output."""
        self._rng = random.Random(f"{scenario.name} {seed}")
        self._scenario = scenario
        self._runner = assembled.runner
        confined = _confined(assembled, scenario, max_tokens)
        self._max_rows = confined.sizes.max_num_seqs
        self.recorder = Recorder()
        self._frames: list[tuple[int, Down | Event]] = []
        self._engine = confined.engine(EnginePorts(self, self, NoHeartbeat()))
        self._engine._traces.append(self.recorder)
        if not scenario.may_draft:
            self._engine.scheduler.drafting = NoDrafting()
        if scenario.crowded:
            self._engine.scheduler.pool.allocation = Crowded()
        self._handle = 1
        self._open: dict[int, Outcome] = {}
        self.facts = confined.facts

    # -- the bridge ----------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down | Event]]:
        frames, self._frames = self._frames, []
        return frames

    def wake(self, event: Event) -> None:
        self._frames.append((-1, event))

    def broadcast(self, load: Load) -> None:
        """Do nothing."""

    def send(self, frontend: int, frame: Up) -> None:
        if not isinstance(frame, StepFrame):
            return
        for failed in frame.failed:
            outcome = self._open.pop(failed.handle)
            outcome.finish = f"{failed.fault.reason}: {failed.fault.message}"
        for handle, token in zip(frame.handles, frame.ids, strict=True):
            self._open[handle].ids.append(token)
        for handle, records in frame.logprobs.items():
            self._open[handle].records += records
        for handle, records in frame.prompt_logprobs.items():
            self._open[handle].prompt_records += records
        for handle in frame.preempted:
            self._open[handle].num_preempted += 1
        for finished in frame.finished:
            outcome = self._open.pop(finished.handle)
            outcome.finish, outcome.num_cached = finished.reason.name, finished.num_cached_prompt
            outcome.steps = self.recorder.computed.pop(finished.handle, [])

    # -- requests ------------------------------------------------------------------------------------------------------

    def run(self, asked: Columns[tuple[int, Drawn, tuple[int, ...]]], stop_s: float) -> list[Outcome]:
        """Send (number, request, continued ids) as the scenario says; return the outcomes that are complete in time."""
        outcomes: list[Outcome] = []
        waiting = list(reversed(asked))
        target, until = 1, 0
        turn = 0
        while (waiting or self._open) and time.monotonic() < stop_s:
            if turn >= until:
                target, until = self._target(), turn + self._rng.randint(1, 40)
            while waiting and len(self._open) < target and self._rng.random() < 0.97:
                outcomes += self._add(*waiting.pop())
            self._engine.step()
            turn += 1
        if self._open:
            raise TimeoutError("the time is over")
        return outcomes

    def _target(self) -> int:
        """Return how many outputs to have at a time: small and large companies equally often."""
        most = self._scenario.company
        return max(1, round(most ** self._rng.random())) if self._rng.random() < 0.5 else self._rng.randint(1, most)

    def _add(self, number: int, drawn: Drawn, continued: tuple[int, ...]) -> list[Outcome]:
        request = request_of(drawn, str(self._handle), continued=continued, share=self._scenario.prefix_caching)
        outcomes = [Outcome(number, output, len(continued)) for output in range(request.num_outputs)]
        self._frames.append((0, Add(self._handle, request)))
        for outcome in outcomes:
            self._open[self._handle] = outcome
            self._handle += 1
        return outcomes

    def close(self) -> None:
        """Leave the model without sequences, as a new engine expects it."""
        while self._engine.scheduler.live.has_work() or self._engine._launched:
            self._engine.step()
        self._engine.scheduler.live.constraints.close()
        self._runner.submit(Batch(0, (), (), (), left=tuple(range(1, self._max_rows + 1)))).result()


def _is_plain(request: Request) -> bool:
    sampling = request.sampling
    is_processed = sampling.is_filtered or sampling.is_penalised or sampling.logit_bias or sampling.allowed_token_ids
    is_scored = request.logprobs != NO_LOGPROBS
    return not (is_processed or is_scored or request.constraint or request.stop.min_tokens)


def _confined(assembled: Assembled, scenario: Scenario, max_tokens: int) -> Assembled:
    """Return the model for an engine with the scenario's limits, never above those that it was loaded for."""
    config, sizes = assembled.config, assembled.sizes
    layout = "contiguous" if scenario.contiguous else "paged"
    cache = dataclasses.replace(config.cache, enable_prefix_caching=scenario.prefix_caching, kv_layout=layout)
    scheduler = dataclasses.replace(config.scheduler, scheduling_policy=scenario.policy)
    tokens = min(scenario.max_num_batched_tokens, sizes.max_num_batched_tokens)
    rows = min(scenario.company, sizes.max_num_seqs)
    facts = assembled.facts
    longest = facts.kv.blocks(max_tokens)
    num_blocks = longest * scenario.kv_requests if scenario.kv_requests else assembled.runner.num_blocks
    runner = Confined(assembled.runner, int(num_blocks))
    return dataclasses.replace(
        assembled,
        config=dataclasses.replace(config, cache=cache, scheduler=scheduler),
        sizes=dataclasses.replace(sizes, max_num_seqs=rows, max_num_batched_tokens=tokens, max_chunk=tokens),
        runner=runner,
        facts=replace(facts, num_blocks=runner.num_blocks, max_queue_size=1 << 20, max_queued_tokens=1 << 30),
    )
