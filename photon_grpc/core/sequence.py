"""One output while it is alive."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

from photon_grpc.core.kv import BlockTable
from photon_grpc.core.request import FinishReason, Request

#: The policy's number, then the order of arrival. The smallest is first.
Rank = tuple[float, int]


class Status(IntEnum):
    WAITING = 0
    #: Cannot run until its voided flights have settled, its leader has computed the prompt, or another thread is done.
    PARKED = 1
    RUNNING = 2
    FINISHED = 3


class Flight(NamedTuple):
    """One launched step of a sequence that has not been read yet."""

    step: int
    #: Tokens whose keys and values this step writes.
    computes: int
    #: Most tokens that it may append to the sequence: 0, or 1 + the drafts among `computes`.
    may_yield: int


class Sequence:
    """Ids, how many of them are computed, and the steps in flight.

    The Scheduler changes it. The BlockPool sets `table`, and `num_computed` when an admission finds tokens in the
    prefix cache. The StepFrameBuilder sets `is_prompt_counted`.

    wanted = known ids + what flights may yield; launched = computed + what flights compute. The difference is what
    remains to be computed. Prefill, its later chunks, decode, the rest after a prefix hit and resumption after
    preemption are all this one subtraction. A flight that verifies drafts counts as if every draft were kept, so both
    numbers are upper bounds until it settles.
    """

    __slots__ = (
        "request",
        "handle",
        "index",
        "frontend",
        "ids",
        "num_prompt",
        "num_given",
        "max_len",
        "num_computed",
        "flights",
        "status",
        "table",
        "slot",
        "rank",
        "running_rank",
        "stop_ids",
        "leader",
        "is_prompt_counted",
        "num_cached",
        "first_scheduled_s",
        "admitted_step",
        "last_step",
        "finish_reason",
        "fingerprint",
    )

    def __init__(self, request: Request, handle: int, index: int, frontend: int, rank: Rank) -> None:
        self.request = request
        self.handle = handle
        self.index = index
        self.frontend = frontend
        self.ids: list[int] = [*request.prompt_ids, *request.continued_ids]
        self.num_prompt = len(request.prompt_ids)
        #: Ids that came with the request: the prompt, then the part of the output that it continues.
        self.num_given = len(self.ids)
        self.max_len = self.num_prompt + request.stop.max_tokens
        self.num_computed = 0
        self.flights: deque[Flight] = deque()
        self.status = Status.WAITING
        self.table = BlockTable()
        #: Row in the runner's slot table; 0 while it has none.
        self.slot = 0
        #: Order among waiting sequences.
        self.rank = rank
        #: Order among running sequences. The smallest is served first, the largest is preempted first.
        self.running_rank = rank
        self.stop_ids = frozenset(request.stop.eos_token_ids) | frozenset(request.stop.stop_token_ids)
        #: The sequence that computes the shared prompt of a request with several outputs.
        self.leader: Sequence | None = None
        #: For a leader: whether an output of its request has begun or ended, so that the prompt was counted.
        self.is_prompt_counted = False
        self.num_cached = 0
        self.first_scheduled_s: float | None = None
        #: The step in which it got its present slot.
        self.admitted_step = 0
        #: The newest step that computes it.
        self.last_step = 0
        self.finish_reason = FinishReason.UNSPECIFIED
        #: Identifies its request in the quarantine; the same for all attempts. b"" without a quarantine.
        self.fingerprint = b""

    @property
    def num_launched(self) -> int:
        """Tokens that will be computed once all flights have settled, if every draft is kept."""
        return self.num_computed + sum(flight.computes for flight in self.flights)

    @property
    def num_generated(self) -> int:
        """Ids sampled for this sequence."""
        return len(self.ids) - self.num_given

    @property
    def num_output(self) -> int:
        """Ids of its output: continued ones that came with the request, and sampled ones."""
        return len(self.ids) - self.num_prompt
