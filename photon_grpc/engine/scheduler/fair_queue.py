"""Fair share between owners: start-time fair queueing, with the tokens that were computed for an owner as its cost.

Goyal, Vin, Cheng, Start-time Fair Queueing (SIGCOMM 1996): the owner whose virtual time is least is served next, and
one that comes back begins where the service is, so that an absence earns no credit. How long an output will be is not
known beforehand, so tokens are charged as they come: Sheng et al., Fairness in Serving Large Language Models (OSDI
2024).
"""

from __future__ import annotations

from photon_grpc.core.sequence import Rank, Sequence
from photon_grpc.engine.scheduler.queue import RankedQueue


class _Owner:
    """One owner's waiting sequences, and its virtual time: tokens by weight."""

    __slots__ = ("charged", "served", "waiting", "weight")

    def __init__(self) -> None:
        self.waiting = RankedQueue()
        self.weight = 1
        #: Virtual time but for what `charged` has gained since.
        self.served = 0.0
        #: Sequence that was seated and has neither ended nor come back to wait -> its ids that are paid for.
        self.charged: dict[Sequence, int] = {}

    def virtual_time(self) -> float:
        gained = sum([len(seq.ids) - num_paid for seq, num_paid in self.charged.items()])
        return self.served + gained / self.weight

    def settle(self, seq: Sequence) -> None:
        num_paid = self.charged.pop(seq, None)
        if num_paid is not None:
            self.served += (len(seq.ids) - num_paid) / self.weight

    def weigh(self, weight: int) -> None:
        """What was charged so far stays at the weight that it was charged by."""
        if weight != self.weight:
            self.served = self.virtual_time()
            self.charged = {seq: len(seq.ids) for seq in self.charged}
            self.weight = weight

    def lift(self, virtual_time: float) -> None:
        self.served += max(virtual_time - self.virtual_time(), 0.0)


class FairQueue:
    """A WaitingQueue. The least virtual time is next, arrival decides among equals; within an owner the policy's rank
    decides alone.

    An owner is charged with the ids of its sequences, divided by its weight: with those given when a sequence is
    seated, but for what the prefix cache had, and with those drawn as they come. What is computed again after a
    preemption is free. So virtual times of owners that always have sequences waiting differ by at most a prompt and
    the outputs that fit the seats. Nothing is kept back: an owner alone gets everything.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._num_waiting = 0
        #: Those that ever had a sequence: as many as names of keys.
        self._owners: dict[str, _Owner] = {}
        #: Those that have one waiting.
        self._waiting: dict[str, _Owner] = {}
        #: Of the owner served last, when it was: the service's.
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, seq: Sequence) -> None:
        owner = self._owners.setdefault(seq.request.owner, _Owner())
        owner.settle(seq)
        owner.weigh(seq.request.limits.weight)
        if not len(owner.waiting):
            owner.lift(self._virtual_time)
            self._waiting[seq.request.owner] = owner
        owner.waiting.push(seq)
        self._num_waiting += 1
        self.num_tokens += len(seq.ids)

    def first(self) -> Sequence:
        owners = self._waiting.values()
        if len(owners) == 1:
            (owner,) = owners
        else:
            owner = min(owners, key=lambda each: (each.virtual_time(), each.waiting.first().rank[1]))
        return owner.waiting.first()

    def take(self, seq: Sequence) -> Rank:
        """Those seated later give way first, whoever owns them; one that comes back keeps its rank."""
        owner = self._owners[seq.request.owner]
        is_new = seq.first_scheduled_s is None
        start = owner.virtual_time()
        self._virtual_time = max(self._virtual_time, start)
        self.remove(seq)
        owner.charged[seq] = seq.num_computed if is_new else len(seq.ids)
        return (start, seq.rank[1]) if is_new else seq.seat_rank

    def remove(self, seq: Sequence) -> None:
        owner = self._owners[seq.request.owner]
        owner.waiting.remove(seq)
        if not len(owner.waiting):
            del self._waiting[seq.request.owner]
        self._num_waiting -= 1
        self.num_tokens -= len(seq.ids)

    def ended(self, seq: Sequence) -> None:
        if owner := self._owners.get(seq.request.owner):
            owner.settle(seq)

    def longest(self) -> int:
        return max((len(owner.waiting) for owner in self._waiting.values()), default=0)

    def surplus(self, owner: str) -> Sequence | None:
        """The last of the owner with most sequences waiting, if `owner` has fewer, also with one more."""
        most = max(self._waiting.values(), key=lambda each: len(each.waiting), default=None)
        own = self._waiting.get(owner)
        num_own = len(own.waiting) if own else 0
        return most.waiting.last_unserved() if most and len(most.waiting) > num_own + 1 else None
