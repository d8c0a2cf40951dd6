"""The engine's queue as a front end sees it: what the engine has told, and what it cannot have counted yet."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import msgspec

from photon_grpc.core.admission import check_queue
from photon_grpc.core.ask import Ask, ChatInput, IdsInput, TextInput
from photon_grpc.core.frames import Facts
from photon_grpc.core.stats import Load
from photon_grpc.errors import QueueFull

#: A guess of the tokens in a text that is not tokenized yet; for English it is about right.
_CHARS_PER_TOKEN = 4


class EngineQueue:
    """Refuses at once what finds the queue full. The engine's verdict is final: it alone knows what other front ends
    have sent.

    A request counts here from `place` on: while its prompt is prepared, by an estimate of its tokens; once sent, until
    the engine says that its Load counts it.
    """

    def __init__(self) -> None:
        #: The newest that the engine has told.
        self.load = Load()
        #: (handle, tokens) of what was sent and is in no Load yet.
        self._sent: deque[tuple[int, int]] = deque()
        self._num_sent_tokens = 0
        #: Whose prompts are prepared, by caller, the oldest first.
        self._preparing: dict[str, dict[QueuePlace, None]] = {}
        self._num_preparing = 0
        self._num_preparing_tokens = 0

    def preparing(self, ask: Ask, facts: Facts, num_of_owner: int, *, is_small: bool) -> AbstractContextManager[None]:
        """Return the place of `ask` while its prompt is prepared. One that is not small has its place in the Encoder,
        which bounds them. Raise QueueFull."""
        num_tokens = estimate_tokens(ask, facts)
        if is_small:
            return self.place(num_tokens, facts, num_of_owner, ask.origin.caller)
        self.check(num_tokens, facts, num_of_owner)
        return nullcontext()

    def place(self, num_tokens: int, facts: Facts, num_of_owner: int = 0, caller: str = "") -> QueuePlace:
        """Return the place of a request for as long as its prompt, of about `num_tokens`, is prepared. Where there is
        none, the newest of the caller that prepares most gives way to one of a caller that prepares fewer. Raise
        QueueFull."""
        try:
            self.check(num_tokens, facts, num_of_owner)
        except QueueFull as error:
            surplus = self._surplus(caller)
            if surplus is None:
                raise
            check_queue(num_tokens, self._expected(surplus), facts)
            surplus.give_way(error)
        return QueuePlace(self, num_tokens, caller)

    def enter(self, place: QueuePlace) -> None:
        """One more is prepared."""
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
        """Return the newest of the caller that prepares most, if without it that one still has as many as `caller`
        would."""
        most = max(self._preparing, key=lambda each: len(self._preparing[each]), default=caller)
        if len(self._preparing.get(most, ())) <= len(self._preparing.get(caller, ())) + 1:
            return None
        return next(reversed(self._preparing[most]))

    def check(self, num_tokens: int, facts: Facts, num_of_owner: int = 0) -> None:
        """Raise QueueFull where one more request, of `num_tokens`, exceeds what may wait.

        `num_of_owner`: requests of its owner here, itself included; 0: not counted. A full queue is no matter for an
        owner with fewer of them than wait of the owner with most: the engine makes room.
        """
        if 0 < num_of_owner < self.load.longest_queue:
            return
        if not (self.load.queued or self._sent or self._num_preparing):
            return  # an empty queue takes any request
        check_queue(num_tokens, self._expected(), facts)

    def _expected(self, surplus: QueuePlace | None = None) -> Load:
        """Return the Load with all that the engine cannot have counted, but for `surplus`."""
        num_tokens = self._num_sent_tokens + self._num_preparing_tokens - (surplus.num_tokens if surplus else 0)
        return msgspec.structs.replace(
            self.load,
            queued=self.load.queued + len(self._sent) + self._num_preparing - (surplus is not None),
            queued_prompt_tokens=self.load.queued_prompt_tokens + num_tokens,
        )

    def sent(self, handle: int, num_tokens: int) -> None:
        """A request is on its way to the engine."""
        self._sent.append((handle, num_tokens))
        self._num_sent_tokens += num_tokens

    def told(self, load: Load, newest_added: int = 0) -> None:
        """The engine's newest Load, which counts all that was sent up to the handle `newest_added`."""
        self.load = load
        while self._sent and self._sent[0][0] <= newest_added:
            self._num_sent_tokens -= self._sent.popleft()[1]

    def lost(self) -> None:
        """The engine is gone, and what it had with it."""
        self.load = Load()
        self._sent.clear()
        self._num_sent_tokens = 0


class QueuePlace:
    """A request that is prepared counts in its queue within the block. Not a generator: one is made for every call."""

    __slots__ = ("_num_cancels", "_queue", "_refusal", "_task", "caller", "num_tokens")

    def __init__(self, queue: EngineQueue, num_tokens: int, caller: str) -> None:
        self.num_tokens = num_tokens
        self.caller = caller
        self._queue = queue
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._refusal: QueueFull | None = None

    def give_way(self, refusal: QueueFull) -> None:
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
        # As in asyncio.timeout: who was cancelled by others, too, stays cancelled.
        elif self._task is not None and self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise self._refusal from None


def estimate_tokens(ask: Ask, facts: Facts) -> int:
    """About how many tokens the prompt will have: exact for ids; a quarter of a text's characters, at most what the
    context holds."""
    if isinstance(ask.input, IdsInput):
        return len(ask.input.token_ids)
    num_chars = 0
    if isinstance(ask.input, TextInput):
        num_chars = len(ask.input.text)
    elif isinstance(ask.input, ChatInput):
        num_chars = sum(len(message.content) for message in ask.input.messages)
    return min(num_chars // _CHARS_PER_TOKEN + 1, facts.max_model_len)
