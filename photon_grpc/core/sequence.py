"""One output while it is alive."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

from photon_grpc.core.kv import BlockTable
from photon_grpc.core.request import FinishReason, Request

#: Smaller is first: the policy's number, then the order of arrival.
Rank = tuple[float, int]


class Status(IntEnum):
    WAITING = 0
    #: Not runnable until something happens: its voided flights settle, its leader has computed the prompt, another
    #: thread is done.
    PARKED = 1
    RUNNING = 2
    FINISHED = 3


class Flight(NamedTuple):
    """One launched step of a sequence that has not been read yet."""

    step: int
    #: Tokens whose keys and values this step writes.
    computes: int
    #: Tokens it may append to the sequence: at most 1 and the drafts among `computes`.
    may_yield: int


class Sequence:
    """Ids, how far they are computed, and what is in flight. The Scheduler changes it; the BlockPool sets `table`, and
    `num_computed` where an admission finds tokens computed; the StepFrameBuilder sets `is_prompt_told`.

    wanted = ids known + what flights may yield; launched = computed + what flights compute. The difference is what is
    left to compute: prefill, a later chunk of it, decode, a prefix hit's rest and resumption after preemption are all
    that one subtraction. A flight that verifies drafts counts as if every draft were kept, so both are upper bounds
    until it settles.
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
        "seat_rank",
        "stop_ids",
        "leader",
        "is_prompt_told",
        "num_cached",
        "first_scheduled_s",
        "seated_step",
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
        #: Ids that came with the request: the prompt, and the beginning of the output where it is continued.
        self.num_given = len(self.ids)
        self.max_len = self.num_prompt + request.stop.max_tokens
        self.num_computed = 0
        self.flights: deque[Flight] = deque()
        self.status = Status.WAITING
        self.table = BlockTable()
        #: Row of the runner's slot table; 0 while it has none.
        self.slot = 0
        #: Among those that wait.
        self.rank = rank
        #: Among those that run: smaller is served first, the largest gives way.
        self.seat_rank = rank
        self.stop_ids = frozenset(request.stop.eos_token_ids) | frozenset(request.stop.stop_token_ids)
        #: The sequence that computes the shared prompt of a request with several outputs.
        self.leader: Sequence | None = None
        #: Of a leader: whether an output of its request has begun or ended, by which the prompt is counted.
        self.is_prompt_told = False
        self.num_cached = 0
        self.first_scheduled_s: float | None = None
        #: The step in which it got its present seat.
        self.seated_step = 0
        #: The newest step in which it flew.
        self.last_step = 0
        self.finish_reason = FinishReason.UNSPECIFIED
        #: Of its request, where suspects are kept; all attempts have the same.
        self.fingerprint = b""

    @property
    def num_launched(self) -> int:
        """Tokens that are computed when all flights have settled, if every draft is kept."""
        return self.num_computed + sum(flight.computes for flight in self.flights)

    @property
    def num_generated(self) -> int:
        """Ids drawn here."""
        return len(self.ids) - self.num_given

    @property
    def num_output(self) -> int:
        """Ids of its output: those that came with the request, and those drawn here."""
        return len(self.ids) - self.num_prompt
