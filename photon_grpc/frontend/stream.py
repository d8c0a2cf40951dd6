"""The stream of one request: new text of its outputs, merged into one Update whenever the reader comes.

A slow reader costs the memory of its unread text, at most that of max_tokens, and does not slow other streams. A reader
of one stream iterates; a reader of many registers a callback (`call_when_due`) and calls `take`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple

from msgspec.structs import replace

from photon_grpc.core.ask import Ask
from photon_grpc.core.frames import Finished, Started
from photon_grpc.core.generation import Start, Timing, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import RETRY_AFTER_S, DeadlinePassed, Draining, EngineFailure, EngineRestarting, PhotonError
from photon_grpc.frontend.output.logprobs import NO_TOKEN_LOGPROBS, PromptLogprobs
from photon_grpc.frontend.output.output import OutputText
from photon_grpc.frontend.output.update import OutputDelta, Update
from photon_grpc.frontend.record import RequestRecord
from photon_grpc.frontend.write_turns import WriteTurns


class Prompt(NamedTuple):
    """The prompt of a request as it is billed, and its log-probabilities."""

    num_tokens: int
    scores: PromptLogprobs


@dataclass(slots=True)
class _Measured:
    """The numbers in the usage, the timing and the record of a request; times in seconds since its arrival."""

    arrival_s: float
    num_prompt: int
    num_cached: int = 0
    #: None before an output has begun or ended.
    queue_s: float | None = None
    num_preemptions: int = 0
    first_token_s: float | None = None
    #: When the last output ended.
    last_token_s: float | None = None

    def now_s(self) -> float:
        return time.monotonic() - self.arrival_s

    def prompt_computed(self, num_cached: int, queue_s: float) -> None:
        # The prompt is computed and billed once, for the output that is reported first.
        if self.queue_s is None:
            self.num_cached, self.queue_s = num_cached, queue_s

    def prompt_usage(self) -> tuple[int, int]:
        """Return the numbers of prompt tokens and of cached ones, both 0 before an output has begun or ended."""
        return (0, 0) if self.queue_s is None else (self.num_prompt, self.num_cached)

    def timing(self) -> Timing:
        total_s = self.now_s()
        first_s = total_s if self.first_token_s is None else self.first_token_s
        return Timing(self.queue_s or 0.0, first_s, total_s, self.num_preemptions)


class TokenStream:
    """An async iterator of Updates for one reader, which calls `close` in the end.

    The Frontend feeds it on the same event loop.
    """

    def __init__(
        self,
        start: Start,
        outputs: tuple[OutputText, ...],
        *,
        prompt: Prompt,
        ask: Ask,
        turns: WriteTurns,
        on_close: Callable[[TokenStream, RequestRecord], None],
    ) -> None:
        """Start with nothing to read. `turns` limits the streams that write in one turn of the event loop.

        `on_close` is called once with the record of the request, when the last Update is read, an error is raised or
        `close` is called.
        """
        self.start = start
        self.outputs = outputs
        #: Outputs that the engine may still have tokens for.
        self.num_running = len(outputs)
        #: Complete once the first output has its first id.
        self.prompt_scores = prompt.scores
        self._origin = ask.origin if ask.origin.request_id else replace(ask.origin, request_id=start.request_id)
        self._measured = _Measured(ask.origin.arrival_s, prompt.num_tokens)
        self._options = ask.stream
        self._interval_s = ask.stream.min_interval_s
        self._is_immediate = not self._interval_s and ask.stream.max_tokens_per_message is None
        self._turns = turns
        self._on_close = on_close
        self._is_closed = False
        self._error: PhotonError | None = None
        #: The reader's callback, called once when there may be something to take.
        self._on_due: Callable[[], None] | None = None
        #: Calls `_on_due` at the end of the interval.
        self._timer: asyncio.TimerHandle | None = None
        #: Whether to send now, whatever the options say.
        self._is_urgent = False
        self._has_news = False
        self._has_sent = False
        self._num_gathered = 0
        self._last_sent_s = 0.0
        #: Whether the last Update was read.
        self._is_complete = False

    # The reader's side.

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Update:
        """Wait until an Update is due and this turn of the event loop has a place; return the Update.

        Raise PhotonError.
        """
        while not self._is_closed:
            if not (self._has_something() and self._turns.take()):
                await self._wait_for_news()
            update = None if self._is_closed else self.take()
            if update is not None:
                return update
        raise StopAsyncIteration

    def take(self) -> Update | None:
        """Return all that has gathered, None while nothing is due. The stream ends with the Update that has a timing.

        Raise PhotonError, which ends the stream, too.
        """
        if self._is_due():
            return self._take()
        if self._error is not None:
            self.close(self._error)
            raise self._error
        return None

    def call_when_due(self, call: Callable[[], None]) -> None:
        """Call `call` once when there may be something to take, at once if there is already."""
        self._on_due = call
        if self._has_something():
            self._wake()
        elif self._has_news and self._interval_s:
            delay_s = max(self._last_sent_s + self._interval_s - time.monotonic(), 0.0) + 1e-4
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def close(self, error: BaseException | None = None) -> None:
        """End the stream and abort its running outputs; `error` is the reason if it is incomplete.

        A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        self._on_close(self, self._record(error))

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    # The engine's side, by way of the Frontend.

    def push(self, output: OutputText, token_id: int) -> bool:
        """Add the next id of one of `outputs`; return whether it ended the output, which must then be aborted."""
        is_first = output.num_tokens == output.num_replayed
        is_over = output.push(token_id)
        self._num_gathered += 1
        if is_first:
            self._is_urgent = True
            if self._measured.first_token_s is None:
                self._measured.first_token_s = self._measured.now_s()
        if is_over:
            self._ended_one()
            self._is_urgent = True
        if not self._has_news:
            self._has_news = output.has_new_text()
        # With an interval, the first news wakes the reader, which sets its timer and sleeps again.
        if self._on_due is not None and (self._is_due() or (self._has_news and self._interval_s and not self._timer)):
            self._wake()
        return is_over

    def started(self, started: Started) -> None:
        self._measured.prompt_computed(started.num_cached_prompt, started.queue_s)

    def preempted(self) -> None:
        """Count a preemption: an output lost its KV blocks to others and will be computed again."""
        self._measured.num_preemptions += 1

    def end(self, output: OutputText, finished: Finished) -> None:
        """End one of `outputs` as the engine reports it."""
        self._measured.prompt_computed(finished.num_cached_prompt, finished.queue_s)
        output.end(finished.reason)
        self._ended_one()
        self._is_urgent = self._has_news = True
        self._wake()

    def ended(self) -> None:
        """End a stream whose outputs had all ended before it was sent: nothing is computed or billed."""
        self.num_running = self._measured.num_prompt = 0
        self._is_urgent = self._has_news = True

    def fail(self, error: PhotonError) -> None:
        """Have the reader get `error` after all that has gathered."""
        if self._error is None:
            self._error = error
            self._measured.last_token_s = self._measured.now_s()
            self.num_running = 0
            self._is_urgent = self._has_news
            self._wake()

    def fail_lost(self, *, is_last: bool = False) -> None:
        """Fail the stream because the engine is lost; if nothing was read, drop all, so that the reader may retry.

        With `is_last` the service was being stopped, and starts no other engine.
        """
        is_unread = self._options.is_whole or not self._has_sent
        if is_unread:
            self.drop()
        if is_last:
            self.fail(Draining("the server was stopped"))
        elif is_unread:
            self.fail(EngineRestarting(f"{EngineRestarting.text}; nothing was sent yet"))
        else:
            self.fail(EngineFailure("the engine was lost after output began", retry_after_s=RETRY_AFTER_S))

    def drop(self) -> None:
        for output in self.outputs:
            output.drop()
        self._has_news = self._is_urgent = False

    def usage(self) -> Usage:
        """Return the usage up to now."""
        num_delivered = sum([output.num_delivered for output in self.outputs])
        return Usage(self._measured.num_prompt, self._measured.num_cached, num_delivered, *self._drafts())

    def _drafts(self) -> tuple[int, int]:
        """Return the tokens that were drafted, and those that became output."""
        usages = [output.usage for output in self.outputs if output.num_drafts]
        return sum(each.draft_tokens for each in usages), sum(each.accepted_draft_tokens for each in usages)

    def _is_withheld(self) -> bool:
        """Return whether the request failed before anything was sent, so that no output token is billed.

        A passed deadline bills what was computed, as a cancellation does; an unreachable one bills nothing.
        """
        if self._error is None or type(self._error) is DeadlinePassed:
            return False
        return self._options.is_whole or not self._has_sent

    def _ended_one(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self._measured.last_token_s = self._measured.now_s()

    def _record(self, error: BaseException | None) -> RequestRecord:
        """Return the record of the request, ended by `error` or, if incomplete without one, by its reader."""
        billed = (0,) if self._is_withheld() else tuple([output.num_delivered for output in self.outputs])
        measured, total_s = self._measured, self._measured.now_s()
        return RequestRecord(
            self._origin,
            reason="" if self._is_complete else self._origin.reason(self._error or error or asyncio.CancelledError()),
            end_time_s=time.time(),
            total_s=total_s,
            finish_reasons=tuple(
                [FinishReason.UNSPECIFIED if each.finish is None else each.finish.reason for each in self.outputs]
            ),
            usage=Usage(*measured.prompt_usage(), sum(billed), *self._drafts()),
            longest_output_tokens=max(billed),
            num_preemptions=measured.num_preemptions,
            queue_s=measured.queue_s,
            first_token_s=measured.first_token_s,
            last_token_s=total_s if self.num_running else measured.last_token_s,
        )

    def _has_something(self) -> bool:
        """Return whether there is an Update or an error for the reader."""
        return self._is_due() or self._error is not None

    def _is_due(self) -> bool:
        if self._is_urgent:
            return True
        if not self._has_news or self._is_immediate:
            return self._has_news
        max_tokens = self._options.max_tokens_per_message
        if max_tokens is not None and self._num_gathered >= max_tokens:
            return True
        return bool(self._interval_s) and time.monotonic() >= self._last_sent_s + self._interval_s

    def _take(self) -> Update:
        self._is_urgent = self._has_news = False
        self._num_gathered = 0
        outputs = self.outputs
        deltas: tuple[OutputDelta, ...]
        if len(outputs) == 1:
            deltas = (outputs[0].take(),) if outputs[0].has_new_text() else ()
        else:
            deltas = tuple([output.take() for output in outputs if output.has_new_text()])
        if not self._has_sent and not deltas:
            # The first token is reported even if it releases no text yet.
            deltas = tuple([output.take() for output in outputs if output.num_delivered])
        prompt_scores = NO_TOKEN_LOGPROBS if self._has_sent else self.prompt_scores.take()
        self._has_sent = True
        if self._interval_s:
            self._last_sent_s = time.monotonic()
        if not self.num_running and self._error is None and all(output.is_finish_taken for output in outputs):
            last = Update(deltas, self.usage(), self._measured.timing(), prompt_scores)
            self._is_complete = True
            self.close()
            return last
        return Update(deltas, self.usage() if self._options.continuous_usage else None, None, prompt_scores)

    async def _wait_for_news(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self.call_when_due(partial(self._turns.settle, waiter))
        try:
            await waiter
        finally:
            self._forget_reader()

    def _wake(self) -> None:
        call = self._on_due
        self._forget_reader()
        if call is not None:
            call()

    def _forget_reader(self) -> None:
        self._on_due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
