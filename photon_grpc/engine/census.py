"""Counts and rates of the engine, as every frame of tokens carries them."""

from __future__ import annotations

import time

from photon_grpc.core.batch import StepOutput
from photon_grpc.core.stats import Load
from photon_grpc.engine.scheduler.report import Report
from photon_grpc.engine.scheduler.scheduler import Scheduler

#: Rates are averages over about this long.
_WINDOW_S = 1.0


class Census:
    """Filled step by step; `load` is a snapshot."""

    def __init__(self) -> None:
        self.steps = 0
        self._step_s = 0.0
        self._output = self._overrun = self._finished = self._failed = self._left = 0
        self._since_s = time.monotonic()
        self._mark = (0, 0, 0)
        self._rates = (0.0, 0.0, 0.0)

    def stepped(self, output: StepOutput) -> None:
        self.steps += 1
        self._step_s = output.duration_s

    def count(self, report: Report) -> None:
        self._output += report.output_tokens
        self._overrun += report.overrun_tokens
        for columns in report.columns.values():
            self._finished += len(columns.finished)
            self._failed += len(columns.failed)

    def left(self) -> None:
        """An output ended by its front end: a stop string, or a caller who has gone. Its seat is free as after any other end."""
        self._left += 1

    def retry_after_s(self, num_waiting: int) -> float:
        """Seconds until the queue has drained at the measured rate; between 0.1 and 30."""
        ended_per_s = self._rates[2]
        return min(30.0, max(0.1, num_waiting / ended_per_s)) if ended_per_s else 1.0

    def load(self, scheduler: Scheduler) -> Load:
        self._measure(scheduler)
        pool = scheduler.pool
        return Load(
            running=len(scheduler.running),
            queued=len(scheduler.waiting),
            queued_prompt_tokens=scheduler.waiting.num_tokens,
            total_blocks=pool.num_blocks,
            owned_blocks=pool.num_owned,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free,
            limbo_blocks=pool.num_limbo,
            step_s=self._step_s,
            output_tokens_per_s=self._rates[0],
            prompt_tokens_per_s=self._rates[1],
            steps=self.steps,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_prompt_tokens=scheduler.num_cached_tokens,
            output_tokens=self._output,
            overrun_tokens=self._overrun,
            preemptions=scheduler.num_preemptions,
            finished=self._finished,
            failed=self._failed,
            retry_after_s=self.retry_after_s(len(scheduler.waiting)),
        )

    def _measure(self, scheduler: Scheduler) -> None:
        now_s = time.monotonic()
        elapsed_s = now_s - self._since_s
        if elapsed_s < _WINDOW_S:
            return
        mark = (self._output, scheduler.num_prompt_tokens, self._finished + self._left)
        output, prompt, ended = (new - old for new, old in zip(mark, self._mark, strict=True))
        self._rates = (output / elapsed_s, prompt / elapsed_s, ended / elapsed_s)
        self._since_s, self._mark = now_s, mark
