"""Counts and rates of the engine, as front ends get them."""

from __future__ import annotations

import time

from photon_grpc.core.batch import StepOutput
from photon_grpc.core.expert_tally import ExpertTally
from photon_grpc.core.stats import Load
from photon_grpc.engine.scheduler.scheduler import Scheduler
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder

#: Rates are averages over about this time.
_WINDOW_S = 1.0


class EngineStats:
    """Statistics that each step updates; `load` takes a snapshot."""

    def __init__(self) -> None:
        self.steps = 0
        self._step_s = 0.0
        self._prompt = self._cached = self._output = self._overrun = 0
        self._session_cached = self._saturated = 0
        self._experts = ExpertTally()
        self._drafted = 0
        self._accepted_at: tuple[int, ...] = ()
        self._finished = self._failed = self._cancelled = 0
        #: When the window began; None while idle.
        self._since_s: float | None = None
        self._mark = (0, 0, 0)
        #: Output and prompt tokens per second.
        self._rates = (0.0, 0.0)
        self._ended_per_s = 0.0

    def stepped(self, output: StepOutput) -> None:
        self.steps += 1
        self._step_s = output.duration_s
        self._saturated = max(self._saturated, output.num_saturated)
        self._experts = output.experts or self._experts

    def count(self, report: StepFrameBuilder) -> None:
        self._overrun += report.overrun_tokens
        self._prompt += report.prompt_tokens
        self._cached += report.cached_tokens
        self._session_cached += report.session_cached_tokens
        if report.draft_tokens:
            self._drafted += report.draft_tokens
            self._accepted_at = _counted(self._accepted_at, report.accepted_at)
        for columns in report.columns.values():
            self._output += len(columns.ids)
            self._finished += len(columns.finished)
            self._failed += len(columns.failed)

    def stopped(self) -> None:
        """Count an output that its front end ended at a stop string."""
        self._finished += 1

    def cancelled(self) -> None:
        """Count a cancelled output."""
        self._cancelled += 1

    def load(self, scheduler: Scheduler) -> Load:
        self._measure(scheduler)
        pool, live = scheduler.pool, scheduler.live
        return Load(
            running=len(live.running),
            queued=live.num_queued,
            queued_prompt_tokens=live.num_queued_tokens,
            total_blocks=pool.num_blocks,
            owned_blocks=pool.num_owned,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free,
            limbo_blocks=pool.num_limbo,
            step_s=self._step_s,
            output_tokens_per_s=self._rates[0],
            prompt_tokens_per_s=self._rates[1],
            ended_per_s=self._ended_per_s,
            steps=self.steps,
            prompt_tokens=self._prompt,
            cached_prompt_tokens=self._cached,
            session_cached_prompt_tokens=self._session_cached,
            output_tokens=self._output,
            overrun_tokens=self._overrun,
            preemptions=scheduler.num_preemptions,
            saturated=self._saturated,
            finished=self._finished,
            failed=self._failed,
            cancelled=self._cancelled,
            longest_queue=live.waiting.longest(),
            draft_tokens=self._drafted,
            accepted_at=self._accepted_at,
            expert_layers=self._experts.layers,
            experts_reached=self._experts.reached,
            busiest_expert_tokens=self._experts.busiest,
            expert_tokens=self._experts.pairs,
        )

    def _measure(self, scheduler: Scheduler) -> None:
        """Measure rates over windows with work, since idle time says nothing about how fast the queue drains."""
        if not scheduler.live.has_work():
            self._since_s, self._rates = None, (0.0, 0.0)
            return
        now_s = time.monotonic()
        mark = (self._output, self._prompt, self._finished + self._cancelled)
        if self._since_s is None:
            self._since_s, self._mark = now_s, mark
            return
        elapsed_s = now_s - self._since_s
        if elapsed_s < _WINDOW_S:
            return
        output, prompt, ended = (new - old for new, old in zip(mark, self._mark, strict=True))
        self._rates, self._ended_per_s = (output / elapsed_s, prompt / elapsed_s), ended / elapsed_s
        self._since_s, self._mark = now_s, mark


def _counted(before: tuple[int, ...], rows: list[int]) -> tuple[int, ...]:
    """Add the accepted drafts of every row to the counts by their place."""
    counts = [*before, *(0,) * (max(rows) - len(before))]
    for number in rows:
        for place in range(number):
            counts[place] += 1
    return tuple(counts)
