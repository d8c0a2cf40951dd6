"""The engine's loop: read frames, launch a Batch, settle a StepOutput, send a frame to every front end concerned."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

from photon_grpc.core.admission import missing_room
from photon_grpc.core.batch import StepOutput
from photon_grpc.core.fault import Fault
from photon_grpc.core.frames import Abort, Add, Control, Down, Facts, Failed, Reply, Watch
from photon_grpc.core.ports import EnginePorts, Event, Pending, Runner
from photon_grpc.core.request import FinishReason, Request
from photon_grpc.core.sequence import Sequence, Status
from photon_grpc.engine.admission import AdmissionControl
from photon_grpc.engine.arrivals import Arrivals
from photon_grpc.engine.broadcaster import LoadBroadcaster
from photon_grpc.engine.engine_stats import EngineStats
from photon_grpc.engine.pictures import Pictures
from photon_grpc.engine.quotas import NO_QUOTAS, NoQuotas
from photon_grpc.engine.scheduler.deadline import check_deadline, is_begun
from photon_grpc.engine.scheduler.scheduler import Scheduler
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder
from photon_grpc.engine.scheduler.timers import TimerKind, Timers
from photon_grpc.engine.step_trace import StepTrace
from photon_grpc.errors import (
    AbortedByAdmin,
    DeadlinePassed,
    DeadlineUnreachable,
    DuplicateRequestId,
    QueueFull,
    QueueTimeout,
    RequestError,
)

_LOG = logging.getLogger(__name__)

#: How long to wait for frames when sequences wait but none can run, which only a defect can cause.
_STALLED_S = 0.05


class Launched(NamedTuple):
    pending: Pending
    num_tokens: int


class Engine:
    """Adds, aborts and steps requests, without touching tensors.

    Args:
        scheduler: plans the steps and owns the sequences.
        runner: computes. Up to `runner.depth` steps stay unread while the next is launched.
        ports: connect to the bridge and the supervisor.
        facts: what front ends were sent; limits the queue.
        quotas: of owners, over all front ends.
        trace: records every step, if given.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        ports: EnginePorts,
        facts: Facts,
        quotas: NoQuotas = NO_QUOTAS,
        trace: StepTrace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._arrivals = Arrivals(ports.inbox)
        self._outbox = ports.outbox
        self._heartbeat = ports.heartbeat
        #: Estimates the duration of steps; `compose` adds those before the first request.
        self.step_times = scheduler.deadlines.step_times
        self._timers = Timers()
        self.stats = EngineStats()
        self._broadcaster = LoadBroadcaster(self.stats, scheduler, ports.outbox, ports.load_interval_s)
        self._facts = facts
        self._admission = AdmissionControl(scheduler, facts, quotas)
        self._launched: deque[Launched] = deque()
        #: Sequences that arrived since the last step was planned.
        self._arrived: set[Sequence] = set()
        #: Pictures only while they are watched.
        self._traces: list[StepTrace] = [trace] if trace else []
        self._pictures = Pictures(self.stats, scheduler, ports.outbox, facts)
        self._stopped = False
        self._stalled = False
        self._num_missing = 0

    def run(self) -> None:
        """Step until `stop`, or until the other side of the bridge is gone."""
        try:
            while not self._stopped:
                self.step()
        except EOFError:
            return
        finally:
            for trace in self._traces:
                trace.close()
            self.scheduler.live.constraints.close()

    def stop(self) -> None:
        """End the loop after the current step. Safe in a signal handler."""
        self._stopped = True

    def step(self) -> None:
        """Read the inbox, launch the next step, settle what may not stay unread, and give the step its masks.

        Raise EOFError when the other side of the bridge is gone, and what the runner raises when its device is lost.
        """
        report = StepFrameBuilder()
        for frontend, frame in self._arrivals.take(self._max_wait_s()):
            self._receive(frontend, frame, report)
            # The supervisor sees progress, however many frames there are and however long each takes.
            self._beat(0)
        now_s = time.monotonic()
        early = self._expire(now_s, report)
        batch = self.scheduler.schedule(now_s, report)
        self._refuse_waiting(early, report)
        self._arrived.clear()
        num_tokens = 0 if batch is None else sum(batch.counts)
        self._beat(num_tokens)
        if batch is not None:
            self.scheduler.quarantine.launching(batch)
            for trace in self._traces:
                trace.launching(batch, self.scheduler.newest_rows)
            self._launched.append(Launched(self._runner.submit(batch), num_tokens))
        self._stalled = not self._launched
        while len(self._launched) > max(self._runner.depth, 1):
            self._settle_oldest(report)
        if batch is not None and batch.masked:
            # After settling, since masks depend on the ids before.
            pending = self._launched[-1].pending
            pending.sample(self.scheduler.masks(pending.drafts(), report))
        if self._launched and (batch is None or self._runner.depth == 0):
            self._settle_oldest(report)
        self._send(report)

    def _beat(self, num_tokens: int) -> None:
        """Send a heartbeat before `num_tokens` more are computed, after those of unread steps."""
        for launched in self._launched:
            num_tokens += launched.num_tokens
        self._heartbeat.beat(self.step_times.allowance_s(num_tokens), num_tokens)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _max_wait_s(self) -> float | None:
        """Return the seconds to wait for frames: 0 while there is work, else until something is due, if anything."""
        if self._launched or len(self._arrivals):
            return 0.0
        if self.scheduler.live.has_work():
            return _STALLED_S if self._stalled else 0.0
        self._check_blocks()
        nexts_s = (self._timers.next_s(), self._broadcaster.due_s(), self._pictures.due_s())
        due_s = min((at_s for at_s in nexts_s if at_s is not None), default=None)
        return None if due_s is None else max(0.0, due_s - time.monotonic())

    def _check_blocks(self) -> None:
        """Check while idle that every block is free or cached.

        Log a leak once when blocks are missing. Raise RuntimeError when a block is owned twice, since two sequences
        would write it.
        """
        pool = self.scheduler.pool
        num_missing = pool.num_blocks - pool.num_available
        if num_missing < 0:
            pool.check()
        if num_missing > self._num_missing:
            _LOG.error(
                "%d of %d KV blocks are lost: owned %d, limbo %d, %d sequences alive",
                num_missing,
                pool.num_blocks,
                pool.num_owned,
                pool.num_limbo,
                len(self._admission),
            )
        self._num_missing = num_missing

    def _receive(self, frontend: int, frame: Down | Event, report: StepFrameBuilder) -> None:
        self._broadcaster.changed()
        if isinstance(frame, Add):
            self._add(frontend, frame, report)
            self.scheduler.quarantine.received()
        elif isinstance(frame, Event):
            self.scheduler.live.resume(frame, report)
            self._forget_ended(report)
        elif isinstance(frame, Abort):
            self._abort(frontend, frame)
        elif isinstance(frame, Watch):
            self._watch(frontend, frame)
        else:
            self._control(frontend, frame, report)

    def _add(self, frontend: int, add: Add, report: StepFrameBuilder) -> None:
        report.added(frontend, add.handle)
        try:
            fingerprint = self.scheduler.quarantine.receive(add.request)
            self._check(add.request, report)
        except RequestError as error:
            for index in range(max(add.request.num_outputs, 1)):
                report.refused(frontend, Failed.of(add.handle + index, error))
            return
        for seq in self._admission.replaced(add.request):
            self._fail(seq, DuplicateRequestId("a later attempt of the same call replaced this one"), report)
        seqs = self._admission.admit(frontend, add, fingerprint)
        self._arrived.update(seqs)
        try:
            self._check_deadline(seqs[0])
            self.scheduler.live.add(seqs, report)
        except DeadlineUnreachable as error:
            for seq in seqs:
                self.scheduler.live.fail(seq, Fault.of(error), report)
        self._forget_ended(report)
        for seq in seqs:
            self._timers.add(seq)

    def _check(self, request: Request, report: StepFrameBuilder) -> None:
        """Raise RequestError for an inadmissible request.

        In a full queue, requests of the owner with most of them make room for those of another.
        """
        load = self.stats.load(self.scheduler)
        try:
            self._admission.check(request, load)
        except QueueFull:
            missing = missing_room(request.num_given, load, self._facts)
            removable = self.scheduler.live.waiting.room(request.owner, request.num_given, *missing)
            if not removable:
                raise
            message = "the queue is full, mostly by requests of this API key; one of another key took its place"
            for seq in removable:
                self._fail(seq, QueueFull(message, retry_after_s=load.retry_after_s), report)
            self._admission.check(request, self.stats.load(self.scheduler))

    def _check_deadline(self, seq: Sequence) -> None:
        """Raise DeadlineUnreachable if the fastest steps cannot meet the deadline."""
        request = seq.request
        if request.deadline_s is None:
            return
        left_s = request.deadline_s - time.monotonic()
        if self.scheduler.deadlines.least_s(request) > left_s:
            check_deadline(
                left_s, self.scheduler.deadlines.least_s(request, self.scheduler.slot_assigner.num_known(seq))
            )

    def _forget_ended(self, report: StepFrameBuilder) -> None:
        """Remove ended sequences from the maps at once, so that later frames cannot end them again."""
        for seq in report.newly_ended():
            self._admission.forget(seq)

    def _learn_lengths(self, report: StepFrameBuilder) -> None:
        for columns in report.columns.values():
            for finished in columns.finished:
                self.scheduler.deadlines.output_ended(finished.num_generated)

    def _abort(self, frontend: int, abort: Abort) -> None:
        count = self.stats.stopped if abort.by_stop_string else self.stats.cancelled
        for handle in abort.handles:
            seq = self._admission.find(frontend, handle)
            if seq is not None:
                self.scheduler.live.remove(seq)
                self._admission.forget(seq)
                for trace in self._traces:
                    trace.aborted(seq, abort.by_stop_string)
                count()
                if abort.by_stop_string:
                    self.scheduler.deadlines.output_ended(seq.num_generated)

    def _watch(self, frontend: int, watch: Watch) -> None:
        if self._pictures.is_watched:
            self._traces.remove(self._pictures)
        self._pictures.watch(frontend, watch.is_on)
        if self._pictures.is_watched:
            self._traces.append(self._pictures)

    def _control(self, frontend: int, control: Control, report: StepFrameBuilder) -> None:
        verb, quarantine = control.verb, self.scheduler.quarantine
        if verb == "reset_prefix_cache":
            reply = Reply(control.id, self.scheduler.pool.reset_prefixes())
        elif verb == "abort_requests":
            reply = Reply(control.id, names=self._abort_requests(control.names, report))
        elif verb == "list_quarantine":
            reply = Reply(control.id, suspects=quarantine.suspects())
        else:
            reply = Reply(control.id, names=quarantine.forget(control.names))
        self._outbox.send(frontend, reply)

    def _abort_requests(self, request_ids: tuple[str, ...], report: StepFrameBuilder) -> tuple[str, ...]:
        """End these requests for an operator, or all if none are named; return the ids of those that ended.

        A request whose output has begun is finished, another one fails.
        """
        wanted = set(request_ids)
        seqs = [seq for seq in self._admission.live() if not wanted or seq.request.request_id in wanted]
        for seq in seqs:
            if seq.num_generated:
                self._finish(seq, FinishReason.ABORTED, report)
            else:
                self._fail(seq, AbortedByAdmin("an operator aborted this request"), report)
        return tuple(sorted({seq.request.request_id for seq in seqs}))

    def _expire(self, now_s: float, report: StepFrameBuilder) -> list[Sequence]:
        """End what has run out of time.

        Return requests whose queue deadline had passed on arrival; this step may still schedule them.
        """
        overdue: list[Sequence] = []
        early: list[Sequence] = []
        for due, seq in self._timers.pop_due(now_s):
            if due is TimerKind.DEADLINE:
                self._fail(seq, DeadlinePassed("the deadline passed before the output was complete"), report)
            elif due is TimerKind.TIME_LIMIT:
                self._finish(seq, FinishReason.TIME_LIMIT, report)
            else:
                (early if seq in self._arrived else overdue).append(seq)
        self._refuse_waiting(overdue, report)
        return early

    def _refuse_waiting(self, overdue: list[Sequence], report: StepFrameBuilder) -> None:
        for seq in overdue:
            if not is_begun(seq) and seq.status is not Status.FINISHED:
                retry_after_s = self.stats.load(self.scheduler).retry_after_s
                message = "the request waited longer than max_queue_duration"
                self._fail(seq, QueueTimeout(message, retry_after_s=retry_after_s), report)

    def _finish(self, seq: Sequence, reason: FinishReason, report: StepFrameBuilder) -> None:
        self.scheduler.live.remove(seq, reason)
        self._admission.forget(seq)
        report.finished(seq)

    def _fail(self, seq: Sequence, error: RequestError, report: StepFrameBuilder) -> None:
        self.scheduler.live.remove(seq)
        self._admission.forget(seq)
        report.failed(seq, Fault.of(error))

    # -- sending -------------------------------------------------------------------------------------------------------

    def _settle_oldest(self, report: StepFrameBuilder) -> None:
        launched = self._launched.popleft()
        output: StepOutput = launched.pending.result()
        # What was due during the step ends for that reason, not by the ids of the step.
        self._expire(time.monotonic(), report)
        self.step_times.stepped(launched.num_tokens, output.duration_s)
        self.scheduler.settle(output, report)
        for trace in self._traces:
            trace.settled(output)
        self.stats.stepped(output)
        self._broadcaster.changed()

    def _send(self, report: StepFrameBuilder) -> None:
        if report.ended:
            self._forget_ended(report)
            self._learn_lengths(report)
        self.stats.count(report)
        for trace in self._traces:
            trace.turned(report, self.scheduler)
        self._timers.sweep(len(self._admission))
        if report.columns:
            self._broadcaster.changed()
            load = self.stats.load(self.scheduler)
            for frontend, frame in report.frames(self.stats.steps, load):
                self._outbox.send(frontend, frame)
        self._broadcaster.send(time.monotonic())
