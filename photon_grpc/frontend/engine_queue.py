"""The engine's queue as a front end sees it: the newest Load, plus the requests that it cannot have counted yet."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

import msgspec

from photon_grpc.core.admission import check_queue
from photon_grpc.core.frames import Facts
from photon_grpc.core.stats import Load
from photon_grpc.errors import QueueFull


class EngineQueue:
    """Refuses requests at once while the queue is full. The engine decides: it alone knows what other front ends send.

    A request counts here by an estimate of its tokens while its prompt is prepared, then from `sent` until the engine's
    Load counts it.
    """

    def __init__(self) -> None:
        #: The newest Load of the engine.
        self.load = Load()
        #: (handle, tokens) of sent requests that no Load counts yet.
        self._sent: deque[tuple[int, int]] = deque()
        self._num_sent_tokens = 0
        #: Requests whose prompts are prepared, by caller, the oldest first.
        self._preparing: dict[str, dict[QueuePlace, None]] = {}
        self._num_preparing = 0
        self._num_preparing_tokens = 0

    def place(self, num_tokens: int, facts: Facts, num_of_owner: int = 0, caller: str = "") -> QueuePlace:
        """Return the place of a request while its prompt of about `num_tokens` is prepared. Raise QueueFull.

        In a full queue, a caller that prepares fewer requests displaces the newest one of the caller that prepares
        most.
        """
        try:
            self.check(num_tokens, facts, num_of_owner)
        except QueueFull as error:
            surplus = self._surplus(caller)
            if surplus is None:
                raise
            check_queue(num_tokens, self._expected(surplus), facts)
            surplus.refuse(error)
        return QueuePlace(self, num_tokens, caller)

    def enter(self, place: QueuePlace) -> None:
        """Count one more request in preparation."""
        self._preparing.setdefault(place.caller, {})[place] = None
        self._num_preparing += 1
        self._num_preparing_tokens += place.num_tokens

    def leave(self, place: QueuePlace) -> None:
        places = self._preparing[place.caller]
        del places[place]
        if not places:
            del self._preparing[place.caller]
        self._num_preparing -= 1
        self._num_preparing_tokens -= place.num_tokens

    def _surplus(self, caller: str) -> QueuePlace | None:
        """Return the newest place of the caller that prepares most, None unless it keeps as many as `caller` gets."""
        most = max(self._preparing, key=lambda each: len(self._preparing[each]), default=caller)
        if len(self._preparing.get(most, ())) <= len(self._preparing.get(caller, ())) + 1:
            return None
        return next(reversed(self._preparing[most]))

    def check(self, num_tokens: int, facts: Facts, num_of_owner: int = 0) -> None:
        """Raise QueueFull if the queue has no room for another request of `num_tokens`.

        `num_of_owner` is the number of its owner's requests here, itself included; 0 means that they are not counted.
        An owner with fewer than the longest queue of any owner passes, since the engine makes room for it.
        """
        if 0 < num_of_owner < self.load.longest_queue:
            return
        if not (self.load.queued or self._sent or self._num_preparing):
            return  # an empty queue accepts any request
        check_queue(num_tokens, self._expected(), facts)

    def _expected(self, surplus: QueuePlace | None = None) -> Load:
        """Return the Load plus everything that the engine cannot have counted, except `surplus`."""
        num_tokens = self._num_sent_tokens + self._num_preparing_tokens - (surplus.num_tokens if surplus else 0)
        return msgspec.structs.replace(
            self.load,
            queued=self.load.queued + len(self._sent) + self._num_preparing - (surplus is not None),
            queued_prompt_tokens=self.load.queued_prompt_tokens + num_tokens,
        )

    def sent(self, handle: int, num_tokens: int) -> None:
        """Count a request that was sent to the engine."""
        self._sent.append((handle, num_tokens))
        self._num_sent_tokens += num_tokens

    def update(self, load: Load, newest_added: int = 0) -> None:
        """Take the engine's newest Load, which counts all requests up to the handle `newest_added`."""
        self.load = load
        while self._sent and self._sent[0][0] <= newest_added:
            self._num_sent_tokens -= self._sent.popleft()[1]

    def lost(self) -> None:
        """Forget what was sent to an engine that is lost."""
        self.load = Load()
        self._sent.clear()
        self._num_sent_tokens = 0


class QueuePlace:
    """A context in which a request counts as in preparation. A class for speed, since every call makes one."""

    __slots__ = ("_num_cancels", "_queue", "_refusal", "_task", "caller", "num_tokens")

    def __init__(self, queue: EngineQueue, num_tokens: int, caller: str) -> None:
        self.num_tokens = num_tokens
        self.caller = caller
        self._queue = queue
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._refusal: QueueFull | None = None

    def refuse(self, refusal: QueueFull) -> None:
        """End the block with `refusal`."""
        self._refusal = refusal
        self._queue.leave(self)
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._num_cancels = self._task.cancelling() if self._task else 0
        self._queue.enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._refusal is None:
            self._queue.leave(self)
        # As in asyncio.timeout, a task that others cancelled, too, stays cancelled.
        elif self._task is not None and self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise self._refusal from None
