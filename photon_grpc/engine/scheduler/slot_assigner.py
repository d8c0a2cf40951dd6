"""Assigns slots to waiting sequences in the step being planned."""

from __future__ import annotations

from collections.abc import Hashable

from photon_grpc.core.batch import Admission
from photon_grpc.core.fault import Fault
from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.scheduler.batch_builder import BatchBuilder
from photon_grpc.engine.scheduler.chunking import Chunking
from photon_grpc.engine.scheduler.deadline import Deadlines
from photon_grpc.engine.scheduler.drafting import Drafting
from photon_grpc.engine.scheduler.live_sequences import LiveSequences
from photon_grpc.engine.scheduler.policy import Policy
from photon_grpc.engine.scheduler.quarantine import NoQuarantine, Quarantine
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder


class SlotAssigner:
    """Admits what fits into the rest of a step, and fails sequences that can no longer meet their deadline.

    Args:
        policy: decides which sequences may be admitted.
        chunking: splits prompts over steps, or does not.
        pool: the KV blocks.
        live: every sequence.
        deadlines: find sequences that cannot meet their deadline.
        quarantine: records which request has which slot.
    """

    def __init__(
        self,
        policy: Policy,
        chunking: Chunking,
        pool: BlockPool,
        live: LiveSequences,
        deadlines: Deadlines,
        quarantine: Quarantine | NoQuarantine,
    ) -> None:
        self._policy = policy
        self._chunking = chunking
        self._pool = pool
        self._live = live
        self._deadlines = deadlines
        self._quarantine = quarantine

    def admit(self, plan: BatchBuilder, now_s: float, report: StepFrameBuilder, drafting: Drafting) -> None:
        """Admit waiting sequences in order, until one does not fit into the step.

        `drafting`: says whose prompts drafters compute.
        """
        while plan.budget > 0 and self._live.has_free_slot() and len(self._live.waiting):
            seq = self._live.waiting.first()
            if not self._policy.admits(seq.rank, self._live.newest, len(self._live.running)):
                return
            if not self._live.isolation.may_compute(seq):
                return
            if seq.request.deadline_s is not None and self._comes_too_late(seq, now_s, report):
                continue
            if len(seq.ids) > plan.budget and not self._chunking.share(len(seq.ids), plan.budget, not plan.rows):
                return
            copies = self._take_blocks(seq)
            if copies is None:
                return
            self._admit(plan, seq, copies, now_s, drafting)

    def _comes_too_late(self, seq: Sequence, now_s: float, report: StepFrameBuilder) -> bool:
        """Fail the sequence if its deadline is out of reach; return whether it did."""
        num_running = len(self._live.running)
        if self._deadlines.missed(seq, 0, num_running, now_s) is None:
            return False
        failure = self._deadlines.missed(seq, self.num_known(seq), num_running, now_s)
        if failure is None:
            return False
        self._live.remove(seq)
        report.failed(seq, Fault.of(failure))
        return True

    def _take_blocks(self, seq: Sequence) -> tuple[tuple[int, int], ...] | None:
        """Give the sequence its blocks and return the copies to make; None if there is no room for it now."""
        leader = seq.leader
        if (
            leader is not None
            and self._pool.allocation.may_share
            and seq.num_generated == 0
            and self._live.has_prompt(leader)
        ):
            return self._pool.fork(seq, leader, len(self._live.running))
        root = _root(seq.request)
        max_cached = self._live.prompt_scoring.max_cached(seq)
        return () if self._pool.admit(seq, root, len(self._live.running), max_cached) else None

    def num_known(self, seq: Sequence) -> int:
        """Return the tokens of `seq` that would be found in the prefix cache if it were admitted now."""
        return self._pool.num_known(seq, _root(seq.request))

    def _admit(
        self,
        plan: BatchBuilder,
        seq: Sequence,
        copies: tuple[tuple[int, int], ...],
        now_s: float,
        drafting: Drafting,
    ) -> None:
        self._live.assign_slot(seq)
        seq.admitted_step = plan.step
        self._quarantine.admitted(seq, plan.step)
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now_s
            # Callers see the hit of the first admission only, not that of a resumption.
            seq.num_cached = seq.num_computed
        stop = seq.request.stop
        plan.admissions.append(
            Admission(
                slot=seq.slot,
                ids=tuple(seq.ids),
                num_prompt=seq.num_prompt,
                num_computed=seq.num_computed,
                blocks=tuple(tuple(group) for group in seq.table.groups),
                sampling=seq.request.sampling,
                output_index=seq.index,
                min_tokens=stop.min_tokens,
                banned_until_min=stop.eos_token_ids + stop.stop_token_ids if stop.min_tokens else (),
                logprobs=seq.request.logprobs,
                is_drafted=seq.request.max_drafts > 0 and drafting.computes_prompt(seq, len(self._live.running)),
            )
        )
        plan.copies.extend(copies)
        remaining = len(seq.ids) - seq.num_computed
        fits = remaining <= plan.budget
        count = remaining if fits else self._chunking.share(remaining, plan.budget, not plan.rows)
        end = seq.num_computed + count
        plan.place(seq, count, end, 1 if end == len(seq.ids) else 0)


def _root(request: Request) -> Hashable:
    """Return the key within which prefixes are shared."""
    return request.adapter, request.owner, request.salt
