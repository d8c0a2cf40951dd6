"""Who may come in: the final verdict on what front ends let through, and the maps from names to live sequences."""

from __future__ import annotations

from collections.abc import Iterable

from photon_grpc.core.frames import Add, Facts, Failed
from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.scheduler import Scheduler


class AdmissionControl:
    """Admission, queue limits, uniqueness of ids. A sequence is in the maps from `admit` to `forget`."""

    def __init__(self, scheduler: Scheduler, facts: Facts) -> None:
        self._scheduler = scheduler
        self._facts = facts
        self._by_handle: dict[tuple[int, int], Sequence] = {}
        self._by_id: dict[tuple[str, str], list[Sequence]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_handle)

    def find(self, frontend: int, handle: int) -> Sequence | None:
        return self._by_handle.get((frontend, handle))

    def live(self) -> Iterable[Sequence]:
        return tuple(self._by_handle.values())

    def replaced(self, request: Request) -> list[Sequence]:
        """The sequences of an earlier attempt of the same call; after `refusal` has found no other request under its id."""
        return list(self._by_id.get((request.owner, request.request_id), ()))

    def refusal(self, request: Request, retry_after_s: float) -> Failed | None:
        """Why this request cannot come in, or None. Its handle is the caller's to set."""
        return self._duplicate(request) or self._too_large(request) or self._queue_full(request, retry_after_s)

    def admit(self, frontend: int, add: Add) -> list[Sequence]:
        """The sequences of a request, one per output, known by handle and by id."""
        request = add.request
        rank = self._scheduler.policy.rank(request)
        seqs = []
        for index in range(request.num_outputs):
            self._arrivals += 1
            seq = Sequence(request, add.handle + index, index, frontend, (rank, self._arrivals))
            self._by_handle[frontend, seq.handle] = seq
            seqs.append(seq)
        self._by_id[request.owner, request.request_id] = list(seqs)
        return seqs

    def forget(self, seq: Sequence) -> None:
        if self._by_handle.pop((seq.frontend, seq.handle), None) is None:
            return
        key = (seq.request.owner, seq.request.request_id)
        siblings = self._by_id[key]
        siblings.remove(seq)
        if not siblings:
            del self._by_id[key]

    def _duplicate(self, request: Request) -> Failed | None:
        live = self._by_id.get((request.owner, request.request_id))
        # Whoever knows an id may say that he tries again; only who asks the same takes the place of what runs.
        if live is None or (request.replaces and request.is_attempt_of(live[0].request)):
            return None
        return Failed(
            0, "DUPLICATE_REQUEST_ID", f"request id {request.request_id!r} is in flight already", "request_id"
        )

    def _too_large(self, request: Request) -> Failed | None:
        num_tokens = len(request.prompt_ids) + request.stop.max_tokens
        if num_tokens > self._facts.max_model_len:
            message = f"prompt + max_tokens are {num_tokens} tokens; the context holds {self._facts.max_model_len}"
            return Failed(0, "PROMPT_TOO_LONG", message, "stop.max_tokens", num_tokens, self._facts.max_model_len)
        pool = self._scheduler.pool
        # The last token drawn is never written.
        needed = pool.blocks_for(num_tokens - 1)
        if needed > pool.num_blocks:
            message = (
                f"prompt + max_tokens need {needed} KV blocks of {pool.block_size} tokens; there are {pool.num_blocks}"
            )
            return Failed(0, "KV_CAPACITY", message, "stop.max_tokens", needed, pool.num_blocks)
        return None

    def _queue_full(self, request: Request, retry_after_s: float) -> Failed | None:
        waiting = self._scheduler.waiting
        if len(waiting) >= self._facts.max_queue_size:
            message = f"{len(waiting)} requests are waiting; the queue holds {self._facts.max_queue_size}"
            return Failed(0, "QUEUE_FULL", message, "", len(waiting) + 1, self._facts.max_queue_size, retry_after_s)
        tokens = waiting.num_tokens + len(request.prompt_ids)
        if tokens > self._facts.max_queued_tokens and len(waiting):
            message = f"{waiting.num_tokens} prompt tokens are waiting; the queue holds {self._facts.max_queued_tokens}"
            return Failed(0, "QUEUE_FULL", message, "", tokens, self._facts.max_queued_tokens, retry_after_s)
        return None
