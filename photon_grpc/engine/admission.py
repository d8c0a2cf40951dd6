"""Admits or refuses the requests that front ends send, and maps handles and ids to live sequences."""

from __future__ import annotations

from collections.abc import Iterable

from photon_grpc.core.admission import check_not_empty, check_output, check_queue
from photon_grpc.core.frames import Add, Facts
from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Sequence
from photon_grpc.core.stats import Load
from photon_grpc.engine.quotas import NoQuotas
from photon_grpc.engine.scheduler.scheduler import Scheduler
from photon_grpc.errors import DuplicateRequestId


class AdmissionControl:
    """Checks limits and the uniqueness of ids. A sequence is in the maps from `admit` to `forget`."""

    def __init__(self, scheduler: Scheduler, facts: Facts, quotas: NoQuotas) -> None:
        self._scheduler = scheduler
        self._facts = facts
        self._quotas = quotas
        self._by_handle: dict[tuple[int, int], Sequence] = {}
        self._by_id: dict[tuple[str, str], list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    def find(self, frontend: int, handle: int) -> Sequence | None:
        return self._by_handle.get((frontend, handle))

    def live(self) -> Iterable[Sequence]:
        return tuple(self._by_handle.values())

    def replaced(self, request: Request) -> list[Sequence]:
        """Return the sequences of an earlier attempt of the same call.

        Call it after `check`, which refuses another request with the same id.
        """
        return list(self._by_id.get((request.owner, request.request_id), ()))

    def check(self, request: Request, load: Load) -> None:
        """Raise DuplicateRequestId, InvalidRequest, PromptTooLong, KVCapacity, QuotaExceeded or, last, QueueFull.

        `load` counts the queue without `request`.
        """
        self._check_duplicate(request)
        check_not_empty(request)
        check_output(len(request.prompt_ids), request.stop.max_tokens, self._facts)
        if not self.replaced(request):
            self._quotas.check(request)
        check_queue(request.num_given, load, self._facts)

    def admit(self, frontend: int, add: Add, fingerprint: bytes) -> list[Sequence]:
        """Make the sequences of a request, one per output, and add them to the maps."""
        request = add.request
        rank, arrivals = self._scheduler.policy.rank(request), self._scheduler.live.arrivals
        seqs = []
        for index in range(request.num_outputs):
            seq = Sequence(request, add.handle + index, index, frontend, (rank, next(arrivals)))
            seq.fingerprint = fingerprint
            self._by_handle[frontend, seq.handle] = seq
            seqs.append(seq)
        self._by_id[request.owner, request.request_id] = list(seqs)
        self._quotas.admitted(request)
        return seqs

    def forget(self, seq: Sequence) -> None:
        if self._by_handle.pop((seq.frontend, seq.handle), None) is None:
            return
        key = (seq.request.owner, seq.request.request_id)
        siblings = self._by_id[key]
        siblings.remove(seq)
        self._quotas.ended(seq, is_last=not siblings)
        if not siblings:
            del self._by_id[key]

    def _check_duplicate(self, request: Request) -> None:
        live = self._by_id.get((request.owner, request.request_id))
        # Any caller may claim to retry an id, but only an equal request replaces the one in flight.
        if live is not None and not (request.replaces and request.is_attempt_of(live[0].request)):
            message = f"request id {request.request_id!r} is in flight already"
            raise DuplicateRequestId(message, field="request_id")
