"""Receives messages: the one of a call, few calls at a time; those of a stream of requests, one after another. Large
ones are parsed one at a time, beside the loop.

A call whose message is not read holds no more of it than an HTTP/2 window. One that is read may hold all of it, before
Python sees a byte: calls with one message wait for their turn, and streams of requests end where the memory of all
together is used up.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from photon_grpc.errors import InvalidRequest, MalformedMessage, PhotonError, QueueFull
from photon_grpc.server import metadata
from photon_grpc.server.held_memory import HeldMemory, give_back_freed
from photon_grpc.server.metadata import Context
from photon_grpc.server.places import Places, SharedTurns, WaitingPlaces
from photon_grpc.server.wire import count_fields

MAX_RECEIVING = 10
#: That many of them are left to callers that have none.
_RESERVED_SHARE = 5
MAX_UNPARSED_BYTES = 2**27
#: Parsed where it was received: less than a millisecond for what any field holds.
_SMALL_BYTES = 16 * 1024
#: Calls that wait to send theirs; each costs a window at most.
MAX_WAITING = 1024
#: Of this process above its rest: beyond it streams of requests end, and one message is received at a time.
MAX_HELD_BYTES = 5 * 2**27
#: Of one message; what is above MAX_HELD_BYTES is counted in them.
_LARGE_BYTES = 2**25
#: Between looks once half of that is held: a gigabyte a second may come.
_QUICK_LOOK_INTERVAL_S = 0.01
#: Looks until what was ended has given its memory back.
_LOOKS_OF_AN_END = 3
#: Time for a message while others wait; the more there are, the less.
_GRACE_S = 1.0
_LOOK_INTERVAL_S = 0.05
_MIN_LOOKS = 2
_RETRY_AFTER_S = 1.0

Parse = Callable[[bytes], Any]
#: Ends a call with an error, told as any other.
Fail = Callable[[Exception], Awaitable[None]]


@dataclass(slots=True)
class _Receiving:
    owner: str
    end: Callable[[PhotonError], None]
    #: Times it was seen while others waited. Not by a clock: a late loop receives late.
    num_looks: int = 0


class Intake:
    """Belongs to one event loop."""

    def __init__(
        self,
        reading: Sequence[Places] = (),
        *,
        max_receiving: int = MAX_RECEIVING,
        max_unparsed_bytes: int = MAX_UNPARSED_BYTES,
        memory: HeldMemory | None = None,
    ) -> None:
        """`reading`: places of streams of requests; where memory is needed, the first that can gives it."""
        self._reading = reading
        self._max_receiving = max_receiving
        self._turns = SharedTurns(
            max_receiving,
            WaitingPlaces("calls that wait to send their message", MAX_WAITING, retry_after_s=_RETRY_AFTER_S),
            num_reserved=max_receiving // _RESERVED_SHARE,
            is_newest_first=True,
        )
        self._receiving: dict[Context, _Receiving] = {}
        self._unparsed = SharedTurns(
            1,
            WaitingPlaces(
                "bytes of messages that wait to be parsed",
                max_unparsed_bytes,
                own_make_room=False,
                retry_after_s=_RETRY_AFTER_S,
            ),
        )
        self._thread = ThreadPoolExecutor(1, "parse")
        self._memory = memory or HeldMemory()
        self._peak_bytes = 0
        self._is_much_held = False
        self._next_cut_s = 0.0
        self._num_looks_to_wait = 0
        self._look: asyncio.TimerHandle | None = None
        self._ends: set[asyncio.Task[None]] = set()

    async def message(self, context: Context, parse: Parse, fail: Fail) -> Any:
        """The call's one message. Raise MalformedMessage (also where there is none), InvalidRequest (too many fields),
        QueueFull."""
        received = await self._receive(context, fail)
        if received is grpc.aio.EOF:
            # A cancelled call ends so too; its task is about to be told.
            await asyncio.sleep(0)
            raise MalformedMessage("the call has no message, or ends within it")
        return await self.parse(received, parse)

    def messages(self, context: Context, parse: Parse, max_bytes: int, fail: Fail) -> Messages:
        """Those of a stream of requests. As long as it is read it may hold one of the largest that gRPC lets in: it is
        to have a place among `reading`."""
        self._look_later()
        return Messages(context, _Reading(self, parse, max_bytes), _CutOff(fail, self._ends))

    async def parse(self, message: bytes, parse: Parse) -> Any:
        return parsed(message, parse) if len(message) <= _SMALL_BYTES else await self._parse_beside(message, parse)

    async def _receive(self, context: Context, fail: Fail) -> Any:
        owner = metadata.holder()
        self._look_later()
        await self._turns.take(owner, connection=context.peer())
        self._receiving[context] = _Receiving(owner, _CutOff(fail, self._ends))
        try:
            # Never cancelled from here: gRPC would go on writing to memory that is gone. To cut it off, the call is
            # ended.
            return await context.read()
        finally:
            self._receiving.pop(context, None)
            self._turns.give_back(owner)

    async def _parse_beside(self, message: bytes, parse: Parse) -> Any:
        """In the one thread that does this, so that not several hold the interpreter for long, one after another."""
        owner = metadata.holder()
        await self._unparsed.take(owner, len(message))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, _counted_and_parsed, message, parse)
        finally:
            self._unparsed.give_back(owner)

    # Of the timer, which runs while anything is received.

    def _look_later(self) -> None:
        if self._look is None:
            interval_s = _QUICK_LOOK_INTERVAL_S if self._is_much_held else _LOOK_INTERVAL_S
            self._look = asyncio.get_running_loop().call_later(interval_s, self._look_around)

    def _look_around(self) -> None:
        self._look = None
        now_s = time.monotonic()
        if now_s >= self._next_cut_s:
            self._next_cut_s = now_s + _LOOK_INTERVAL_S
            self._cut_off_the_slow()
        num_bytes = self._memory.num_bytes()
        self._is_much_held = num_bytes > MAX_HELD_BYTES // 2
        self._keep_within(num_bytes)
        self._give_back(num_bytes)
        if self._receiving or self._turns.owners_waiting() or any(places.size for places in self._reading):
            self._look_later()

    def _cut_off_the_slow(self) -> None:
        """Bound the time of a receiver while others wait: one that sends a byte a second would shut them out."""
        for context, call in tuple(self._receiving.items()):
            num_waiting = self._num_waiting_for(call.owner)
            if not num_waiting:
                continue
            grace_s = _GRACE_S * self._max_receiving / (self._max_receiving + num_waiting)
            call.num_looks += 1
            if call.num_looks > max(grace_s / _LOOK_INTERVAL_S, _MIN_LOOKS):
                del self._receiving[context]
                message = f"others wait to send; this message took more than {grace_s:.2f} s to arrive"
                call.end(QueueFull(message, retry_after_s=_RETRY_AFTER_S))

    def _num_waiting_for(self, owner: str) -> int:
        """Calls that wait for a turn that `owner` has: its own, and those of owners that have fewer."""
        turns, num_held = self._turns, self._turns.held[owner]
        claiming = [each for each in turns.owners_waiting() if each == owner or turns.held[each] < num_held]
        return sum(map(turns.num_waiting, claiming))

    def _keep_within(self, num_bytes: int) -> None:
        """MAX_HELD_BYTES."""
        surplus = num_bytes - MAX_HELD_BYTES
        self._turns.is_scarce = surplus > 0
        self._turns.call()
        self._num_looks_to_wait -= self._num_looks_to_wait > 0
        if surplus > 0 and not self._num_looks_to_wait:
            self._num_looks_to_wait = _LOOKS_OF_AN_END
            for _ in range(1 + surplus // _LARGE_BYTES):
                self._end_a_stream()

    def _end_a_stream(self) -> None:
        """An idle one, where there is any: which of them hold memory is not known."""
        for is_busy in (False, True):
            for places in self._reading:
                if places.shed(busy=is_busy):
                    return

    def _give_back(self, num_bytes: int) -> None:
        self._peak_bytes = max(self._peak_bytes, num_bytes)
        if self._peak_bytes - num_bytes > 2 * _LARGE_BYTES:
            self._peak_bytes = num_bytes
            self._thread.submit(give_back_freed)


class _CutOff:
    """Ends a call from outside its task, which reads."""

    def __init__(self, fail: Fail, running: set[asyncio.Task[None]]) -> None:
        self._fail = fail
        #: Of the call's own task.
        self._variables = contextvars.copy_context()
        self._running = running

    def __call__(self, error: PhotonError) -> None:
        task = asyncio.get_running_loop().create_task(self._end(error), context=self._variables)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _end(self, error: PhotonError) -> None:
        with contextlib.suppress(grpc.aio.BaseError, asyncio.CancelledError):
            await self._fail(error)


@dataclass(slots=True)
class _Reading:
    """Rules for the messages of one stream of requests."""

    intake: Intake
    parse: Parse
    max_bytes: int


class Messages:
    """Async iterator. After one that cannot be taken, which raises, the next may be asked for. Can hold the place of
    its call."""

    #: Has a request's id in it.
    _NUM_BEGINNING_BYTES = 256

    def __init__(self, context: Context, reading: _Reading, end: Callable[[PhotonError], None]) -> None:
        self._context = context
        self._reading = reading
        self._end = end
        #: Since when the next message is awaited.
        self._since_s: float | None = time.monotonic()
        #: Of the newest message.
        self.beginning = b""

    def idle_since_s(self) -> float | None:
        return self._since_s

    def evict(self, error: PhotonError) -> None:
        """The next message is none: the end."""
        self._end(error)

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Any:
        """Raise MalformedMessage, InvalidRequest (too large, too many fields), QueueFull."""
        self._since_s = time.monotonic()
        message = await self._context.read()
        self._since_s = None
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        self.beginning = message[: self._NUM_BEGINNING_BYTES]
        max_bytes = self._reading.max_bytes
        if len(message) > max_bytes:
            text = f"the message has {len(message)} bytes; {max_bytes} are allowed in this stream of requests"
            raise InvalidRequest(text, needed=len(message), limit=max_bytes)
        return await self._reading.intake.parse(message, self._reading.parse)


def parsed(message: bytes, parse: Parse) -> Any:
    """Raise MalformedMessage."""
    try:
        return parse(message)
    except DecodeError:
        raise MalformedMessage("the bytes are not a message of this method, or a string in them is not UTF-8") from None


def _counted_and_parsed(message: bytes, parse: Parse) -> Any:
    empty = parsed(b"", parse)
    if hasattr(empty, "DESCRIPTOR"):
        count_fields(message, empty.DESCRIPTOR)
    return parsed(message, parse)
