"""Fair share between owners: start-time fair queueing, with the tokens computed for an owner as its cost.

Goyal, Vin, Cheng, Start-time Fair Queueing (SIGCOMM 1996): the owner with the least virtual time is served next. An
owner that comes back starts at the virtual time of the service, so that an absence earns no credit. The length of an
output is unknown beforehand, so tokens are charged as they are computed: Sheng et al., Fairness in Serving Large
Language Models (OSDI 2024).
"""

from __future__ import annotations

from photon_grpc.core.sequence import Rank, Sequence
from photon_grpc.engine.scheduler.queue import RankedQueue

#: Least number of owners that are remembered.
_LEAST_OWNERS = 64


class _Owner:
    """The waiting sequences of one owner, and its virtual time: tokens divided by weight."""

    __slots__ = ("charged", "served", "waiting", "weight")

    def __init__(self) -> None:
        self.waiting = RankedQueue()
        self.weight = 1
        #: Virtual time without the ids that `charged` has gained since.
        self.served = 0.0
        #: Sequence that got a slot and has neither ended nor returned to the queue -> its ids that are paid for.
        self.charged: dict[Sequence, int] = {}

    def virtual_time(self) -> float:
        gained = sum([len(seq.ids) - num_paid for seq, num_paid in self.charged.items()])
        return self.served + gained / self.weight

    def settle(self, seq: Sequence) -> bool:
        """Charge the unpaid ids of a sequence and forget it; return whether it was being charged."""
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
    """A WaitingQueue that serves the owner with the least virtual time; arrival decides among equals.

    Within an owner only the policy's rank decides. An owner is charged for the ids of its sequences, divided by its
    weight: for the given ids when a sequence gets a slot, except those found in the prefix cache, and for sampled ids
    as they come. Recomputation after a preemption is free. The virtual times of owners that always have sequences
    waiting therefore differ by at most a prompt and the outputs that fit the slots. Nothing is reserved: an owner alone
    gets everything.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._num_waiting = 0
        #: Owners with a sequence, owners ahead of the virtual time of the service, and some others.
        self._owners: dict[str, _Owner] = {}
        self._max_owners = _LEAST_OWNERS
        #: Owners with a waiting sequence.
        self._waiting: dict[str, _Owner] = {}
        #: Of the service: that of the last served owner at that time; while idle, the largest of all owners.
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
        """Rank by admission, so that the latest is preempted first in any owner; a resumed sequence keeps its rank."""
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
            # After idling no owner is behind: what one computed alone does not count when others come.
            self._virtual_time = max(self._virtual_time, *[each.served for each in self._owners.values()])

    def _new_owner(self, name: str) -> _Owner:
        """Add an owner, and forget those that would be treated as new if they came back."""
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
        """Return the last sequence of the owner with most waiting, not counting those in `found`.

        Return None if that owner would then have less than `owner` with the new sequence.
        """

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
