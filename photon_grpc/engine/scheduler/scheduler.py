"""Chooses the next Batch and settles the oldest StepOutput.

RUNNING sequences are planned first, then WAITING ones are admitted into the rest of the token budget. What a sequence
computes is one subtraction (see core.sequence), so that prefill, chunks, decode, prefix hits and resumption need no
modes. Step n + 1 may be chosen before step n is read: a Sequence keeps its Flights, and `settle` pops the one of its
Batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.fault import Fault
from photon_grpc.core.logprobs import RECORD
from photon_grpc.core.sequence import Sequence, Status
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs, MatcherLost, NoGrammars, nothing_to_sample
from photon_grpc.engine.scheduler.batch_builder import BatchBuilder
from photon_grpc.engine.scheduler.chunking import Chunked, Chunking
from photon_grpc.engine.scheduler.deadline import Deadlines
from photon_grpc.engine.scheduler.drafting import Drafting, NoDrafting
from photon_grpc.engine.scheduler.isolation import Isolation
from photon_grpc.engine.scheduler.live_sequences import LiveSequences, end_reason
from photon_grpc.engine.scheduler.policy import Policy
from photon_grpc.engine.scheduler.quarantine import NoQuarantine, Quarantine
from photon_grpc.engine.scheduler.slot_assigner import SlotAssigner
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder
from photon_grpc.errors import InvalidConstraint, NumericFailure


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    #: Number of steps, at least 1: when step n gets its masks, all up to n - depth have settled.
    depth: int = 1
    #: Whether prompts that exceed the rest of a step are split.
    chunking: Chunking = field(default_factory=Chunked)


class Scheduler:
    """Chooses the rows of every step; settles the steps in their order.

    Args:
        limits: slots, tokens per step and how prompts are split over steps.
        policy: ranks requests.
        pool: the KV blocks.
        drafting: chooses how many tokens the runner drafts for a decode row.
        constraints: knows which ids may follow in an output.
        quarantine: knows which requests must compute alone, and traces the steps in flight.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy,
        pool: BlockPool,
        drafting: Drafting | None = None,
        constraints: ConstrainedOutputs | None = None,
        quarantine: Quarantine | NoQuarantine | None = None,
    ) -> None:
        self.limits = limits
        self.drafting = drafting or NoDrafting()
        self.policy = policy
        self.pool = pool
        self.deadlines = Deadlines(limits.max_num_batched_tokens)
        self.quarantine = quarantine or NoQuarantine()
        constraints = constraints or ConstrainedOutputs(NoGrammars(), 0)
        isolation = Isolation(self.quarantine)
        self.live = LiveSequences(limits.max_num_seqs, pool, constraints, policy.queue(), isolation)
        self.slot_assigner = SlotAssigner(policy, limits.chunking, pool, self.live, self.deadlines, self.quarantine)
        self.num_preemptions = 0
        self._step = 0
        self._flying: deque[tuple[Batch, BatchBuilder]] = deque()
        #: Sequence preempted with steps in flight -> the blocks that these steps read, until the last one is read.
        self._read_blocks: dict[Sequence, frozenset[int]] = {}

    @property
    def newest_rows(self) -> list[Sequence]:
        """The sequences of the newest Batch, row by row."""
        return self._flying[-1][1].rows

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float, report: StepFrameBuilder) -> Batch | None:
        """Return the next Batch, or None when no sequence can compute anything now.

        Report preemptions, and the failure of sequences that can no longer meet their deadline.
        """
        plan = self.live.isolation.planned(partial(self._plan, now_s, report), bool(self._flying))
        if plan is None or not plan.rows:
            return None
        self._step = plan.step
        left, self.live.left = self.live.left, []
        batch = plan.freeze(left, self.live.constraints.matchers, self.live.prompt_scoring)
        self._flying.append((batch, plan))
        self.live.launched(plan.step)
        return batch

    def _plan(self, now_s: float, report: StepFrameBuilder) -> BatchBuilder:
        drafts = self.drafting.num_drafts(len(self.live.running), self._has_prompts)
        plan = BatchBuilder(self._step + 1, self.limits.max_num_batched_tokens, self.pool, drafts)
        preemptions = self.num_preemptions
        self._serve_running(plan, report)
        if len(self.live.waiting) and preemptions == self.num_preemptions:
            self.slot_assigner.admit(plan, now_s, report, self.drafting)
        return plan

    def _has_prompts(self) -> bool:
        """Return whether prompts wait, or are not computed to their end."""
        return bool(len(self.live.waiting)) or any(seq.num_launched + 1 < len(seq.ids) for seq in self.live.running)

    def _serve_running(self, plan: BatchBuilder, report: StepFrameBuilder) -> None:
        is_open = bool(plan.drafts or self.live.constraints.matchers)
        for seq in self.live.in_turn():
            if plan.budget <= 0:
                self.live.resume_at = seq.running_rank
                return
            if seq.status is not Status.RUNNING:
                continue
            wanted, launched = len(seq.ids), seq.num_computed
            for flight in seq.flights:
                wanted += flight.may_yield
                launched += flight.computes
            count = wanted - launched
            if count <= 0 or wanted >= seq.max_len:
                continue
            if is_open:
                if self._awaits_settling(seq, plan):
                    continue
                if plan.drafts and count == 1:
                    self._place_drafting(plan, seq, wanted, report)
                    continue
            if count > plan.budget:
                count = self.limits.chunking.share(count, plan.budget, not plan.rows)
                if not count:
                    continue
            end = launched + count
            if end > seq.table.capacity and not self._make_room(seq, end, plan, report):
                continue
            plan.place(seq, count, end, 1 if end == wanted else 0)

    def _awaits_settling(self, seq: Sequence, plan: BatchBuilder) -> bool:
        """Return whether a step with ids of this sequence will be unsettled when the planned step gets its masks."""
        if not seq.flights or seq not in self.live.constraints.matchers:
            return False
        newest = seq.flights[-1]
        return newest.may_yield > 0 and newest.step > plan.step - self.limits.depth

    def _place_drafting(self, plan: BatchBuilder, seq: Sequence, wanted: int, report: StepFrameBuilder) -> None:
        """Place a decode row with as many drafts as max_tokens, budget and free blocks allow, without preemption."""
        forced = self._forced(seq, plan, wanted)
        most = max(self.drafting.of(seq, plan.drafts), len(forced))
        drafts = min(most, seq.max_len - 1 - wanted, plan.budget - 1)
        end = wanted + drafts
        if end > seq.table.capacity:
            grown = self.pool.grow(seq, end)
            if grown is not None:
                plan.grown.extend(grown)
            elif wanted <= seq.table.capacity:
                end = seq.table.capacity
            elif self._make_room(seq, wanted, plan, report):
                end = wanted
            else:
                return
        count = 1 + end - wanted
        plan.place(seq, count, end, count)
        if forced[: count - 1]:
            plan.given.append((seq.slot, forced[: count - 1]))

    def _forced(self, seq: Sequence, plan: BatchBuilder, wanted: int) -> tuple[int, ...]:
        """Return drafts that the constraint of a decode row leaves no choice about, if its steps in flight go well."""
        if seq not in self.live.constraints.matchers:
            return ()
        begin = wanted - len(seq.ids)
        return self.live.constraints.forced(seq)[begin : begin + min(plan.drafts, seq.request.max_drafts)]

    def _make_room(self, seq: Sequence, num_tokens: int, plan: BatchBuilder, report: StepFrameBuilder) -> bool:
        """Extend the table, preempting the worst rank if necessary.

        Return False if this sequence must skip the step or was preempted itself.
        """
        while True:
            grown = self.pool.grow(seq, num_tokens)
            if grown is not None:
                plan.grown.extend(grown)
                return True
            if self.pool.waiting_covers(num_tokens, seq):
                return False
            victim = next(other for other in reversed(self.live.running) if other.last_step != plan.step)
            self._preempt(victim)
            report.preempted(victim)
            if victim is seq:
                return False

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and blocks away; the ids stay.

        Steps in flight still yield their ids, but their keys and values are void.
        """
        self.num_preemptions += 1
        self._release_slot(seq)
        if not seq.flights:
            self.live.wait(seq)

    def _release_slot(self, seq: Sequence) -> None:
        if seq.flights:
            self._read_blocks[seq] = frozenset(chain.from_iterable(seq.table.groups))
        self.live.release_slot(seq)
        self.live.running.remove(seq)
        seq.status = Status.PARKED
        seq.num_computed = 0
        if seq not in self.live.prompt_scoring.unscored:
            # Otherwise they would sample before the prompt has its log-probabilities.
            self.live.release_siblings(seq)

    # -- settling ------------------------------------------------------------------------------------------------------

    def masks(self, drafts: tuple[int, ...], report: StepFrameBuilder) -> memoryview:
        """Return the bitmasks of the newest Batch; a matcher that fails ends only its own sequence.

        Call it once all steps but the newest `limits.depth` have settled. `drafts` and the result are those of
        core.ports.Pending.
        """
        batch, plan = self._flying[-1]
        masks, failures = self.live.constraints.masks(batch, plan.rows, drafts)
        for seq, error in failures.items():
            if isinstance(error, MatcherLost):
                self._lose_matcher(seq, report)
            else:
                self.live.fail(seq, Fault.of(error), report)
        if failures:
            self.live.sweep()
        return masks

    def _lose_matcher(self, seq: Sequence, report: StepFrameBuilder) -> None:
        """Take the slot away until the matcher is made again."""
        if seq.status is Status.RUNNING:
            self._release_slot(seq)
            report.preempted(seq)
        self.live.lost_matcher(seq, report)

    def settle(self, output: StepOutput, report: StepFrameBuilder) -> None:
        """Append what the oldest step in flight produced, end what has ended and close the fence of the step."""
        batch, plan = self._flying.popleft()
        num_known = {row: len(plan.rows[row].ids) for row in output.logprobs}
        has_ended = self._settle_rows(batch, plan, output, report)
        if num_known or output.prompt_logprobs:
            _report_logprobs(output, plan, num_known, report)
        self.live.settled_step = output.step
        if self.live.siblings.num_seqs:
            self.live.wake_siblings()
        if self._read_blocks:
            self._read_blocks = {seq: blocks for seq, blocks in self._read_blocks.items() if seq.flights}
        self.live.settled(batch.step)
        self.drafting.stepped(batch, output.duration_s)
        if has_ended:
            self.live.sweep()
        self.live.isolation.settled()
        self.quarantine.settled(batch.step)

    def _settle_rows(self, batch: Batch, plan: BatchBuilder, output: StepOutput, report: StepFrameBuilder) -> bool:
        """Append the ids of every row; return whether a sequence has ended or lost its matcher."""
        faults = self.quarantine.attributed(output.faults, plan.rows) if output.faults else {}
        ids = iter(self._settle_drafts(batch, plan, output, report) if batch.drafts else output.ids)
        yields, is_plain = batch.yields, not (batch.drafts or batch.masked)
        has_ended = False
        for row, seq in enumerate(plan.rows):
            flight = seq.flights.popleft()
            token = next(ids) if yields[row] else None
            status = seq.status
            if row in faults:
                self._fail(seq, faults[row], plan, report)
                has_ended = True
                continue
            if status is Status.FINISHED:
                report.overrun_tokens += token is not None
                has_ended = True
                continue
            if status is Status.RUNNING:
                seq.num_computed += flight.computes
            if token is not None:
                if is_plain:
                    # The same as `append`, without the cost of a call.
                    seq.ids.append(token)
                    report.token(seq, token)
                    if token in seq.stop_ids or len(seq.ids) >= seq.max_len:
                        self.live.finish(seq, end_reason(seq), report)
                        has_ended = True
                        continue
                elif self._append(seq, token, batch.step, report):
                    has_ended = True
                    continue
            if status is Status.PARKED:
                if not seq.flights:
                    self.live.requeue(seq)
            elif seq.num_computed >= seq.table.settle_at:
                self.pool.settle(seq, self.live.fence(seq))
        return has_ended

    def _append(self, seq: Sequence, token: int, step: int, report: StepFrameBuilder) -> bool:
        """Append an id that a masked or drafting step sampled, unless it is void.

        Return whether this ended the sequence or cost it its matcher.
        """
        live = self.live
        if (live.without_matcher or live.unmasked) and live.is_void(seq, step):
            report.overrun_tokens += 1
            return False
        try:
            return live.append(seq, token, report)
        except MatcherLost:
            self._lose_matcher(seq, report)
            return True

    def _settle_drafts(
        self, batch: Batch, plan: BatchBuilder, output: StepOutput, report: StepFrameBuilder
    ) -> list[int]:
        """Append all but the last id of every row; return the last ids, one for each row that yields.

        Rejected drafts are subtracted from `num_computed`, since their keys and values are written again.
        """
        last: list[int] = []
        ids, lengths = iter(output.ids), iter(output.lengths or repeat(1))
        for row, seq in enumerate(plan.rows):
            if not batch.yields[row]:
                continue
            *kept, token = islice(ids, next(lengths))
            last.append(token)
            if row in output.faults:
                continue
            self.drafting.kept(seq, batch.yields[row] - 1, len(kept))
            if seq.status is Status.RUNNING:
                seq.num_computed -= batch.yields[row] - len(kept) - 1
            before = len(seq.ids)
            for number, token in enumerate(kept):
                if seq.status is Status.FINISHED:
                    report.overrun_tokens += len(kept) - number
                    break
                self._append(seq, token, batch.step, report)
            if batch.yields[row] > 1:
                report.drafted(seq, batch.yields[row] - 1, len(seq.ids) - before)
        return last

    def _fail(self, seq: Sequence, fault: Fault, plan: BatchBuilder, report: StepFrameBuilder) -> None:
        """End a sequence whose row failed, and forget the blocks that the row was to fill."""
        if fault.reason == InvalidConstraint.reason:
            # The row was computed correctly; only nothing could be sampled.
            self.live.fail(seq, Fault.of(nothing_to_sample(seq.request)), report)
            return
        if fault.reason == NumericFailure.reason:
            # Any block that the row read may be corrupt. Sequences that share one are checked by their own logits; no
            # other may find it in the prefix cache.
            self.pool.forget_prefix(seq)
            self.live.fail(seq, fault, report)
            return
        # Steps launched after this one depend on it.
        plans = (plan, *(later for _, later in self._flying))
        void = {block for each in plans for block in each.published_by(seq)}
        self.live.fail(seq, fault, report)
        if not void:
            return
        void |= self.pool.forget(void)
        for other in self.live.running:
            if other.status is Status.RUNNING and not all(map(void.isdisjoint, other.table.groups)):
                self.live.fail(other, self.quarantine.lost(other, fault), report)
        for other, blocks in self._read_blocks.items():
            if other.status is Status.PARKED and not void.isdisjoint(blocks):
                self.live.fail(other, self.quarantine.lost(other, fault), report)


def _report_logprobs(
    output: StepOutput, plan: BatchBuilder, num_known: dict[int, int], report: StepFrameBuilder
) -> None:
    """Report the log-probabilities of appended ids, and those of prompts of live sequences.

    Those of ids dropped after an end are dropped.

    Args:
        num_known: row -> the ids that it had before the step was settled.
    """
    for row, records in output.logprobs.items():
        seq = plan.rows[row]
        num_bytes = (len(seq.ids) - num_known[row]) * seq.request.logprobs.num_records * RECORD.size
        report.logprobs(seq, records[:num_bytes])
    for row, records in output.prompt_logprobs.items():
        seq = plan.rows[row]
        if seq.status is not Status.FINISHED or seq.num_generated:
            report.prompt_logprobs(seq, records)
