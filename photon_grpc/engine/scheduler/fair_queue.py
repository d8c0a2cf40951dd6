"""Fair share between owners: start-time fair queueing, with the tokens that were computed for an owner as its cost.

Goyal, Vin, Cheng, Start-time Fair Queueing (SIGCOMM 1996): the owner whose virtual time is least is served next, and
one that comes back begins where the service is, so that an absence earns no credit. How long an output will be is not
known beforehand, so tokens are charged as they come: Sheng et al., Fairness in Serving Large Language Models (OSDI
2024).
"""

from __future__ import annotations

from photon_grpc.core.sequence import Rank, Sequence
from photon_grpc.engine.scheduler.queue import RankedQueue

#: So many owners are remembered at least.
_LEAST_OWNERS = 64


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

    def settle(self, seq: Sequence) -> bool:
        """Return whether it was charged."""
        num_paid = self.charged.pop(seq, None)
        if num_paid is not None:
            self.served += (len(seq.ids) - num_paid) / self.weight
        return num_paid is not None

    def weigh(self, weight: int) -> None:
        """Set the weight for what is charged from here on."""
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
        #: Those that have a sequence, or have had more than the service has come to, and some others.
        self._owners: dict[str, _Owner] = {}
        self._max_owners = _LEAST_OWNERS
        #: Those that have one waiting.
        self._waiting: dict[str, _Owner] = {}
        #: Of the owner served last, when it was: the service's. At rest, that of the owner with most.
        self._virtual_time = 0.0
        self._num_charged = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, seq: Sequence) -> None:
        owner = self._owners.get(seq.request.owner) or self._new_owner(seq.request.owner)
        self._num_charged -= owner.settle(seq)
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
        """Those seated later give way first, whatever their owner; one that comes back keeps its rank."""
        owner = self._owners[seq.request.owner]
        is_new = seq.first_scheduled_s is None
        start = owner.virtual_time()
        self._virtual_time = max(self._virtual_time, start)
        self.remove(seq)
        owner.charged[seq] = seq.num_computed if is_new else len(seq.ids)
        self._num_charged += 1
        return (start, seq.rank[1]) if is_new else seq.running_rank

    def remove(self, seq: Sequence) -> None:
        owner = self._owners[seq.request.owner]
        owner.waiting.remove(seq)
        if not len(owner.waiting):
            del self._waiting[seq.request.owner]
        self._num_waiting -= 1
        self.num_tokens -= len(seq.ids)

    def ended(self, seq: Sequence) -> None:
        owner = self._owners.get(seq.request.owner)
        if owner is None or not owner.settle(seq):
            return
        self._num_charged -= 1
        if not self._num_charged and not self._waiting:
            # A service at rest owes no owner anything: what one did alone is not paid for when others come.
            self._virtual_time = max(self._virtual_time, *[each.served for each in self._owners.values()])

    def _new_owner(self, name: str) -> _Owner:
        """Forget those that would begin where the service is if they came back, as new ones do."""
        if len(self._owners) >= self._max_owners:
            self._owners = {name: each for name, each in self._owners.items() if not self._is_forgettable(each)}
            self._max_owners = max(2 * len(self._owners), _LEAST_OWNERS)
        self._owners[name] = owner = _Owner()
        return owner

    def _is_forgettable(self, owner: _Owner) -> bool:
        return not (len(owner.waiting) or owner.charged) and owner.served <= self._virtual_time

    def longest(self) -> int:
        return max((len(owner.waiting) for owner in self._waiting.values()), default=0)

    def room(self, owner: str, num_ids: int, num_seqs: int, num_tokens: int) -> list[Sequence]:
        found: list[Sequence] = []
        while (is_in_tokens := num_tokens > sum([len(seq.ids) for seq in found])) or num_seqs > len(found):
            seq = self._surplus(owner, num_ids, found, is_in_tokens)
            if seq is None:
                return []
            found.append(seq)
        return found

    def _surplus(self, owner: str, num_ids: int, found: list[Sequence], is_in_tokens: bool) -> Sequence | None:
        """Of the owner with most waiting but for those `found`, the last, if without it that owner still has as much as
        `owner` would."""

        def size(num_seqs: int, num_tokens: int) -> int:
            return num_tokens if is_in_tokens else num_seqs

        sizes = {name: size(len(each.waiting), each.waiting.num_tokens) for name, each in self._waiting.items()}
        for seq in found:
            sizes[seq.request.owner] -= size(1, len(seq.ids))
        own = sizes.pop(owner, 0) + size(1, num_ids)
        if not sizes:
            return None
        most = max(sizes, key=lambda name: sizes[name])
        last = self._waiting[most].waiting.last_unserved(found)
        return last if last is not None and sizes[most] - size(1, len(last.ids)) >= own else None
