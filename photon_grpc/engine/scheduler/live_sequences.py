"""Every sequence from its coming to its end: waiting, parked or in a seat."""

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
        num_slots: sequences that may run at a time; seat i is slot i of the runner, from 1.
        pool: gets back the blocks of those that leave their seat.
        constraints: which ids may follow in an output.
        waiting: holds those that wait for a seat.
        trial: has suspects compute alone.
    """

    def __init__(
        self, num_slots: int, pool: BlockPool, constraints: ConstrainedOutputs, waiting: WaitingQueue, trial: Isolation
    ) -> None:
        self.constraints = constraints
        self.trial = trial
        self.prompt_scoring = PendingPromptLogprobs()
        self.waiting = waiting
        #: Those that have a seat, best seat rank first; one that has left it is here until `sweep`.
        self.running: list[Sequence] = []
        #: Slots left since the last Batch.
        self.left: list[int] = []
        #: Seat rank of the first running sequence that the budget did not reach: it is served first next time.
        self.resume_at: Rank | None = None
        #: Numbers for the ranks of those that come.
        self.arrivals = count(1)
        #: Of the sequence that came last.
        self.newest: Rank = (0.0, 0)
        self._pool = pool
        self._slots = list(range(num_slots, 0, -1))
        self._slot_limbo = Limbo(pool.fences)
        #: Step in flight -> its ticket.
        self._tickets: dict[int, int] = {}
        #: The newest step that was read.
        self.settled_step = 0
        #: Siblings that wait for the prompt of their leader.
        self.siblings: Parking[Sequence] = Parking()
        #: Sequences that wait for another thread, or for the end of a trial.
        self._awaiting: Parking[Event] = Parking()
        #: Of them those whose matcher was lost and is made again. Step -> those whose row in it has no masks.
        self.without_matcher: set[Sequence] = set()
        self.unmasked: dict[int, set[Sequence]] = {}

    # -- coming --------------------------------------------------------------------------------------------------------

    def add(self, seqs: list[Sequence], report: StepFrameBuilder) -> None:
        """Take the sequences of one request; the first computes the prompt that the others share. A request whose
        constraint is not compiled yet is parked until it is, a suspect while another one is on trial; one whose
        constraint cannot be met fails."""
        leader, *siblings = seqs
        for seq in siblings:
            seq.leader = leader
        self.newest = seqs[-1].rank
        try:
            event = self.trial.begin(seqs) or self.constraints.begin(seqs)
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

    def happened(self, event: Event, report: StepFrameBuilder) -> None:
        """Take again what was parked until `event`: requests last in the order of arrival, so that no static batch that
        is under way takes them in; a sequence whose matcher is there again in the order it had."""
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
        """Sequences that wait for a seat or for another thread."""
        return len(self.waiting) + self._awaiting.num_seqs

    @property
    def num_queued_tokens(self) -> int:
        return self.waiting.num_tokens + self._awaiting.num_tokens

    # -- seats ---------------------------------------------------------------------------------------------------------

    def in_turn(self) -> list[Sequence]:
        """Return a copy of the running, best rank first; where the budget did not reach all of them, from the first it
        left out. During a trial, those whose turn it is."""
        resume_at, self.resume_at = self.resume_at, None
        at = 0 if resume_at is None else bisect_left(self.running, resume_at, key=_running_rank)
        running = self.running[at:] + self.running[:at] if at else self.running[:]
        return self.trial.in_turn(running)

    def has_free_slot(self) -> bool:
        return bool(self._slots)

    def assign_slot(self, seq: Sequence) -> None:
        """Give the first of those that wait a seat."""
        seq.running_rank = self.waiting.take(seq)
        seq.slot = self._slots.pop()
        seq.status = Status.RUNNING
        insort(self.running, seq, key=_running_rank)

    def release_slot(self, seq: Sequence) -> None:
        """Take seat and blocks; both may be given again once no step in flight touches them."""
        fence = self.fence(seq)
        self._pool.release(seq.table, fence, of_session=bool(seq.request.session_id))
        self.left.append(seq.slot)
        if fence:
            self._slot_limbo.put(seq.slot, fence)
        else:
            self._slots.append(seq.slot)
        seq.slot = 0

    def fence(self, seq: Sequence) -> int:
        """Return the newest ticket that touches its blocks and its slot; 0: none does."""
        return self._tickets[seq.last_step] if seq.flights else 0

    def launched(self, step: int) -> None:
        self._tickets[step] = self._pool.fences.open()

    def settled(self, step: int) -> None:
        """Open the fences behind a step."""
        self._pool.fences.close(self._tickets.pop(step))
        if self.unmasked:
            self.unmasked.pop(step, None)
        self._pool.open_limbo()
        if len(self._slot_limbo):
            self._slots += self._slot_limbo.opened()

    # -- matchers that are lost ----------------------------------------------------------------------------------------

    def lost_matcher(self, seq: Sequence, report: StepFrameBuilder) -> None:
        """Has the matcher of a sequence that has left its seat made again; the sequence is parked meanwhile. What the
        steps in flight draw for it is void: they have no masks of it."""
        for flight in seq.flights:
            if flight.may_yield:
                self.unmasked.setdefault(flight.step, set()).add(seq)
        self._begin_anew(seq, report)

    def is_void(self, seq: Sequence, step: int) -> bool:
        """Return whether the step drew for this sequence without masks, or an id before has cost it its matcher."""
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

    def landed(self, seq: Sequence) -> None:
        """The last flight of a sequence without a seat was read."""
        if seq not in self.without_matcher:
            self.wait(seq)

    # -- ending --------------------------------------------------------------------------------------------------------

    def append(self, seq: Sequence, token: int, report: StepFrameBuilder) -> bool:
        """Take a drawn id if the matcher does. Returns whether that has ended the sequence. Raises MatcherLost behind
        an id that has not."""
        is_complete, is_lost = False, False
        if seq in self.constraints.matchers and token not in seq.stop_ids:
            try:
                is_complete = self.constraints.advance(seq, token)
            except MatcherLost:
                # The id is one of its masks; whether it completes the output is seen once there is another.
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
        """End a sequence at once, whatever it is doing; a row in flight is dropped when it settles."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        had_slot = seq.status is Status.RUNNING
        self._end(seq, reason)
        if had_slot:
            self.sweep()

    def _end_of_given(self, seq: Sequence) -> FinishReason | None:
        """Return the reason of an output that the ids it continues from have ended; None: it goes on."""
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
        self.trial.ended(seq)
        if self.siblings.num_seqs:
            self.release_siblings(seq)

    # -- several outputs -----------------------------------------------------------------------------------------------

    def has_prompt(self, leader: Sequence) -> bool:
        """Return whether its prompt may be copied from. What it was admitted with may be written by that very step, and
        copies come first."""
        is_written = leader.num_computed >= leader.num_prompt - 1 and leader.admitted_step <= self.settled_step
        return leader.status is Status.RUNNING and is_written

    def wake_siblings(self) -> None:
        """Release those whose leader has its prompt by now."""
        for leader in self.siblings.awaited():
            if self.has_prompt(leader):
                self.release_siblings(leader)

    def release_siblings(self, leader: Sequence) -> None:
        """The prompt is there, or will not be: its siblings wait for seats of their own."""
        for seq in self.siblings.release(leader):
            self.wait(seq)


def end_reason(seq: Sequence) -> FinishReason:
    """Return the reason of an output that its last id ends."""
    token, stop = seq.ids[-1], seq.request.stop
    if token in stop.eos_token_ids:
        return FinishReason.EOS
    return FinishReason.STOP_TOKEN if token in seq.stop_ids else stop.limit_reason


def _running_rank(seq: Sequence) -> Rank:
    return seq.running_rank
