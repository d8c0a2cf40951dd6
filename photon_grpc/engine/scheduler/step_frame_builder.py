"""Collects what a step reports, in columns per front end."""

from __future__ import annotations

from collections import defaultdict

from photon_grpc.core.fault import Fault
from photon_grpc.core.frames import Failed, Finished, Started, StepFrame
from photon_grpc.core.sequence import Sequence
from photon_grpc.core.stats import Load


class _Columns:
    __slots__ = (
        "handles",
        "ids",
        "finished",
        "failed",
        "started",
        "preempted",
        "newest_added",
        "logprobs",
        "prompt_logprobs",
        "drafts",
    )

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.ids: list[int] = []
        self.finished: list[Finished] = []
        self.failed: list[Failed] = []
        self.started: list[Started] = []
        self.preempted: list[int] = []
        self.newest_added = 0
        self.logprobs: dict[int, bytes] = {}
        self.prompt_logprobs: dict[int, bytes] = {}
        self.drafts: dict[int, tuple[int, int]] = {}


class StepFrameBuilder:
    """Filled by the Scheduler and the Engine during one step, then sent as one StepFrame per front end."""

    __slots__ = (
        "_num_ended",
        "accepted_at",
        "cached_tokens",
        "columns",
        "draft_tokens",
        "ended",
        "overrun_tokens",
        "prompt_tokens",
        "session_cached_tokens",
    )

    def __init__(self) -> None:
        self.columns: defaultdict[int, _Columns] = defaultdict(_Columns)
        #: Sequences whose map entries must be removed.
        self.ended: list[Sequence] = []
        self._num_ended = 0
        self.overrun_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.session_cached_tokens = 0
        self.draft_tokens = 0
        #: For every row with drafts that became output, their number.
        self.accepted_at: list[int] = []

    def drafted(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Report the drafts of a row, and those of them that became output."""
        drafts = self.columns[seq.frontend].drafts
        before = drafts.get(seq.handle, (0, 0))
        drafts[seq.handle] = before[0] + num_drafts, before[1] + num_accepted
        self.draft_tokens += num_drafts
        self.accepted_at.append(num_accepted)

    def token(self, seq: Sequence, token: int) -> None:
        columns = self.columns[seq.frontend]
        columns.handles.append(seq.handle)
        columns.ids.append(token)
        if len(seq.ids) == seq.num_given + 1:
            columns.started.append(Started(seq.handle, seq.num_cached, _queue_s(seq)))
            self._count_prompt(seq)

    def logprobs(self, seq: Sequence, records: bytes) -> None:
        """Add the RECORDs of the ids from the last settled step."""
        if records:
            column = self.columns[seq.frontend].logprobs
            column[seq.handle] = column.get(seq.handle, b"") + records

    def prompt_logprobs(self, seq: Sequence, records: bytes) -> None:
        column = self.columns[seq.frontend].prompt_logprobs
        column[seq.handle] = column.get(seq.handle, b"") + records

    def finished(self, seq: Sequence) -> None:
        if not seq.num_generated:
            self._count_prompt(seq)
        done = Finished(seq.handle, seq.finish_reason, seq.num_generated, seq.num_cached, _queue_s(seq))
        self.columns[seq.frontend].finished.append(done)
        self.ended.append(seq)

    def failed(self, seq: Sequence, fault: Fault) -> None:
        self.refused(seq.frontend, Failed(seq.handle, fault))
        self.ended.append(seq)

    def newly_ended(self) -> list[Sequence]:
        """Return the sequences that have ended since the last call."""
        begin, self._num_ended = self._num_ended, len(self.ended)
        return self.ended[begin:]

    def refused(self, frontend: int, failed: Failed) -> None:
        self.columns[frontend].failed.append(failed)

    def preempted(self, seq: Sequence) -> None:
        self.columns[seq.frontend].preempted.append(seq.handle)

    def added(self, frontend: int, handle: int) -> None:
        """Report the newest Add that was read from this front end."""
        self.columns[frontend].newest_added = handle

    def _count_prompt(self, seq: Sequence) -> None:
        """Count the prompt tokens once for all outputs of the request."""
        leader = seq.leader or seq
        if leader.is_prompt_counted:
            return
        leader.is_prompt_counted = True
        self.prompt_tokens += seq.num_given
        self.cached_tokens += seq.num_cached
        if seq.request.session_id:
            self.session_cached_tokens += seq.num_cached

    def frames(self, step: int, load: Load) -> list[tuple[int, StepFrame]]:
        return [
            (
                frontend,
                StepFrame(
                    step,
                    tuple(c.handles),
                    tuple(c.ids),
                    tuple(c.finished),
                    tuple(c.failed),
                    load,
                    tuple(c.started),
                    tuple(c.preempted),
                    c.newest_added,
                    c.logprobs,
                    c.prompt_logprobs,
                    c.drafts,
                ),
            )
            for frontend, c in self.columns.items()
        ]


def _queue_s(seq: Sequence) -> float:
    arrival_s = seq.request.arrival_s
    return max(0.0, (seq.first_scheduled_s or arrival_s) - arrival_s)
