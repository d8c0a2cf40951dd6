"""Every sequence from its arrival to its end: waiting, parked or in a slot."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count, groupby

from photon_grpc.core.fault import Fault
from photon_grpc.core.ports import Event
from photon_grpc.core.request import FinishReason
from photon_grpc.core.sequence import Rank, Sequence, Status
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.blocks.fences import Limbo
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs, MatcherLost
from photon_grpc.engine.scheduler.isolation import Isolation
from photon_grpc.engine.scheduler.parking import Parking
from photon_grpc.engine.scheduler.prompt_scoring import PendingPromptLogprobs
from photon_grpc.engine.scheduler.queue import WaitingQueue
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder
from photon_grpc.errors import RequestError


class LiveSequences:
    """Changes the states of sequences; the Scheduler decides when.

    Args:
        num_slots: sequences that may run at a time; the runner's slots are numbered from 1.
        pool: gets back the blocks of sequences that leave their slot.
        constraints: knows which ids may follow in an output.
        waiting: holds the sequences that wait for a slot.
        isolation: has suspects compute alone.
    """

    def __init__(
        self, num_slots: int, pool: BlockPool, constraints: ConstrainedOutputs, waiting: WaitingQueue,
        isolation: Isolation,
    ) -> None:  # fmt: skip
        self.constraints = constraints
        self.isolation = isolation
        self.prompt_scoring = PendingPromptLogprobs()
        self.waiting = waiting
        #: Sequences with a slot, best running rank first. One that has left its slot stays here until `sweep`.
        self.running: list[Sequence] = []
        #: Slots that were left since the last Batch.
        self.left: list[int] = []
        #: Running rank of the first sequence that the budget did not reach; it is served first in the next step.
        self.resume_at: Rank | None = None
        #: Arrival numbers, for ranks.
        self.arrivals = count(1)
        #: Rank of the sequence that arrived last.
        self.newest: Rank = (0.0, 0)
        self._pool = pool
        self._slots = list(range(num_slots, 0, -1))
        self._slot_limbo = Limbo(pool.fences)
        #: Step in flight -> its ticket.
        self._tickets: dict[int, int] = {}
        #: The newest step that was read.
        self.settled_step = 0
        #: Sequences that wait for the prompt of their leader.
        self.siblings: Parking[Sequence] = Parking()
        #: Sequences that wait for another thread, or for the end of an isolation.
        self._awaiting: Parking[Event] = Parking()
        #: Those of them whose matcher was lost and is being made again.
        self.without_matcher: set[Sequence] = set()
        #: Step -> the sequences whose row in it has no masks.
        self.unmasked: dict[int, set[Sequence]] = {}

    # -- arriving ------------------------------------------------------------------------------------------------------

    def add(self, seqs: list[Sequence], report: StepFrameBuilder) -> None:
        """Add the sequences of one request; the first computes the prompt that the others share.

        A request is parked until its constraint is compiled, and a suspect while another one is isolated. A request
        with an invalid constraint fails.
        """
        leader, *siblings = seqs
        for seq in siblings:
            seq.leader = leader
        self.newest = seqs[-1].rank
        try:
            event = self.isolation.begin(seqs) or self.constraints.begin(seqs)
        except RequestError as error:
            for seq in seqs:
                self.fail(seq, Fault.of(error), report)
            return
        if event is not None:
            self._awaiting.park(seqs, event)
            return
        reason = self._end_of_given(leader)
        if reason is not None:
            self.finish(leader, reason, report)
            return
        self.prompt_scoring.begin(leader)
        self.wait(leader)
        self.siblings.park(siblings, leader)

    def resume(self, event: Event, report: StepFrameBuilder) -> None:
        """Resume what was parked until `event`.

        Requests get a new arrival number, so that a static batch under way does not include them. A sequence whose
        matcher was made again keeps its rank.
        """
        for _, group in groupby(self._awaiting.release(event), lambda seq: id(seq.request)):
            seqs = list(group)
            if seqs[0] in self.without_matcher:
                for seq in seqs:
                    self._begin_anew(seq, report)
                continue
            for seq in seqs:
                seq.rank = (seq.rank[0], next(self.arrivals))
            self.add(seqs, report)

    def wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self.waiting.push(seq)

    def has_work(self) -> bool:
        """Return whether a step may have a row, now or once a step in flight has settled."""
        return bool(self.running or len(self.waiting))

    @property
    def num_queued(self) -> int:
        """Sequences that wait for a slot or for another thread."""
        return len(self.waiting) + self._awaiting.num_seqs

    @property
    def num_queued_tokens(self) -> int:
        return self.waiting.num_tokens + self._awaiting.num_tokens

    # -- slots ---------------------------------------------------------------------------------------------------------

    def in_turn(self) -> list[Sequence]:
        """Return a copy of the running sequences, best rank first; during an isolation, only those whose turn it is.

        If the last budget did not reach all of them, start with the first one left out.
        """
        resume_at, self.resume_at = self.resume_at, None
        at = 0 if resume_at is None else bisect_left(self.running, resume_at, key=_running_rank)
        running = self.running[at:] + self.running[:at] if at else self.running[:]
        return self.isolation.in_turn(running)

    def has_free_slot(self) -> bool:
        return bool(self._slots)

    def assign_slot(self, seq: Sequence) -> None:
        """Give a slot to `seq`, the first of the queue."""
        seq.running_rank = self.waiting.take(seq)
        seq.slot = self._slots.pop()
        seq.status = Status.RUNNING
        insort(self.running, seq, key=_running_rank)

    def release_slot(self, seq: Sequence) -> None:
        """Take slot and blocks back; both are free again once no step in flight touches them."""
        fence = self.fence(seq)
        self._pool.release(seq.table, fence, of_session=bool(seq.request.session_id))
        self.left.append(seq.slot)
        if fence:
            self._slot_limbo.put(seq.slot, fence)
        else:
            self._slots.append(seq.slot)
        seq.slot = 0

    def fence(self, seq: Sequence) -> int:
        """Return the newest ticket that touches its blocks and its slot; 0 if none does."""
        return self._tickets[seq.last_step] if seq.flights else 0

    def launched(self, step: int) -> None:
        self._tickets[step] = self._pool.fences.open()

    def settled(self, step: int) -> None:
        """Close the ticket of a step and free what waited for it."""
        self._pool.fences.close(self._tickets.pop(step))
        if self.unmasked:
            self.unmasked.pop(step, None)
        self._pool.open_limbo()
        if len(self._slot_limbo):
            self._slots += self._slot_limbo.opened()

    # -- lost matchers -------------------------------------------------------------------------------------------------

    def lost_matcher(self, seq: Sequence, report: StepFrameBuilder) -> None:
        """Park a sequence that has left its slot until its matcher is made again.

        Ids that steps in flight sample for it are void, since they were sampled without masks.
        """
        for flight in seq.flights:
            if flight.may_yield:
                self.unmasked.setdefault(flight.step, set()).add(seq)
        self._begin_anew(seq, report)

    def is_void(self, seq: Sequence, step: int) -> bool:
        """Return whether the step sampled for this sequence without masks, or an earlier id cost it its matcher."""
        return seq in self.unmasked.get(step, ()) or seq in self.without_matcher

    def _begin_anew(self, seq: Sequence, report: StepFrameBuilder) -> None:
        try:
            event = self.constraints.begin_anew(seq)
        except RequestError as error:
            self.fail(seq, Fault.of(error), report)
            return
        if event is not None:
            self.without_matcher.add(seq)
            self._awaiting.park([seq], event)
            return
        self.without_matcher.discard(seq)
        if seq.num_generated and self.constraints.matchers[seq].is_complete:
            self.finish(seq, FinishReason.CONSTRAINT_COMPLETE, report)
        elif len(seq.ids) >= seq.max_len:
            self.finish(seq, end_reason(seq), report)
        elif seq.flights:
            seq.status = Status.PARKED
        else:
            self.wait(seq)

    def requeue(self, seq: Sequence) -> None:
        """Queue a sequence without a slot whose last flight was read."""
        if seq not in self.without_matcher:
            self.wait(seq)

    # -- ending --------------------------------------------------------------------------------------------------------

    def append(self, seq: Sequence, token: int, report: StepFrameBuilder) -> bool:
        """Append a sampled id if the matcher accepts it; return whether the sequence has ended.

        Raise MatcherLost if the id was appended, did not end the sequence, and the matcher was lost.
        """
        is_complete, is_lost = False, False
        if seq in self.constraints.matchers and token not in seq.stop_ids:
            try:
                is_complete = self.constraints.advance(seq, token)
            except MatcherLost:
                # The mask allowed the id. The new matcher will show whether it completes the output.
                is_lost = True
            except RequestError as error:
                self.fail(seq, Fault.of(error), report)
                return True
        seq.ids.append(token)
        report.token(seq, token)
        if is_lost:
            raise MatcherLost
        if is_complete:
            self.finish(seq, FinishReason.CONSTRAINT_COMPLETE, report)
        elif token in seq.stop_ids or len(seq.ids) >= seq.max_len:
            self.finish(seq, end_reason(seq), report)
        return seq.status is Status.FINISHED

    def finish(self, seq: Sequence, reason: FinishReason, report: StepFrameBuilder) -> None:
        self._end(seq, reason)
        report.finished(seq)

    def fail(self, seq: Sequence, fault: Fault, report: StepFrameBuilder) -> None:
        if seq.status is not Status.FINISHED:
            self._end(seq, FinishReason.UNSPECIFIED)
            report.failed(seq, fault)

    def remove(self, seq: Sequence, reason: FinishReason = FinishReason.ABORTED) -> None:
        """End a sequence at once in any state. Rows in flight are dropped when they settle."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        had_slot = seq.status is Status.RUNNING
        self._end(seq, reason)
        if had_slot:
            self.sweep()

    def _end_of_given(self, seq: Sequence) -> FinishReason | None:
        """Return the finish reason if the continued ids already ended the output, else None."""
        num_continued = seq.num_given - seq.num_prompt
        if not num_continued:
            return None
        if seq in self.constraints.matchers and self.constraints.matchers[seq].is_complete:
            return FinishReason.CONSTRAINT_COMPLETE
        is_stop = seq.ids[-1] in seq.stop_ids and num_continued > seq.request.stop.min_tokens
        return end_reason(seq) if is_stop or seq.num_given >= seq.max_len else None

    def sweep(self) -> None:
        self.running = [seq for seq in self.running if seq.status is Status.RUNNING]

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is Status.RUNNING:
            self.release_slot(seq)
        elif seq.status is Status.PARKED:
            self.siblings.leave(seq)
            self._awaiting.leave(seq)
            self.without_matcher.discard(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self.waiting.ended(seq)
        if not self.constraints.is_empty:
            self.constraints.forget(seq)
        if self.prompt_scoring.unscored:
            self.prompt_scoring.forget(seq)
        self.isolation.ended(seq)
        if self.siblings.num_seqs:
            self.release_siblings(seq)

    # -- several outputs -----------------------------------------------------------------------------------------------

    def has_prompt(self, leader: Sequence) -> bool:
        """Return whether its prompt may be copied.

        The step that admitted it must have settled: it may write the blocks, and a step makes its copies first.
        """
        is_written = leader.num_computed >= leader.num_prompt - 1 and leader.admitted_step <= self.settled_step
        return leader.status is Status.RUNNING and is_written

    def wake_siblings(self) -> None:
        """Queue the siblings whose leader has computed the prompt."""
        for leader in self.siblings.awaited():
            if self.has_prompt(leader):
                self.release_siblings(leader)

    def release_siblings(self, leader: Sequence) -> None:
        """Queue the siblings of a leader that has computed the prompt or never will."""
        for seq in self.siblings.release(leader):
            self.wait(seq)


def end_reason(seq: Sequence) -> FinishReason:
    """Return the finish reason of an output that its last id ends."""
    token, stop = seq.ids[-1], seq.request.stop
    if token in stop.eos_token_ids:
        return FinishReason.EOS
    return FinishReason.STOP_TOKEN if token in seq.stop_ids else stop.limit_reason


def _running_rank(seq: Sequence) -> Rank:
    return seq.running_rank
