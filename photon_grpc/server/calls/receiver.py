"""Receives messages: the one of a call, few calls at a time; those of a stream of requests, one after another. Large
ones are parsed one at a time, beside the loop.

A call whose message is not read holds no more of it than an HTTP/2 window. One that is read may hold all of it, before
Python sees a byte: calls with one message wait for their turn, and streams of requests end where the memory of all
together is used up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from photon_grpc.errors import RETRY_AFTER_S, InvalidRequest, MalformedMessage, PhotonError, QueueFull
from photon_grpc.server.calls.call import Call
from photon_grpc.server.calls.held_memory import HeldMemory, give_back_freed
from photon_grpc.server.calls.places import Places, SharedTurns, WaitingPlaces
from photon_grpc.server.wire.fields import count_fields

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

Parse = Callable[[bytes], Any]


class MessageReceiver:
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
        self.turns = SharedTurns(
            max_receiving,
            WaitingPlaces("calls that wait to send their message", MAX_WAITING, retry_after_s=RETRY_AFTER_S),
            num_reserved=max_receiving // _RESERVED_SHARE,
            is_newest_first=True,
        )
        #: Times that a call was seen receiving while others waited. Not by a clock: a late loop receives late.
        self._receiving: dict[Call, int] = {}
        self._unparsed = SharedTurns(
            1,
            WaitingPlaces(
                "bytes of messages that wait to be parsed",
                max_unparsed_bytes,
                own_make_room=False,
                retry_after_s=RETRY_AFTER_S,
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

    async def message(self, call: Call, parse: Parse) -> Any:
        """Return the call's one message. Raise MalformedMessage (also where there is none), InvalidRequest (too many
        fields), QueueFull."""
        received = await self._receive(call)
        if received is grpc.aio.EOF:
            # A cancelled call ends so too; its task is about to be told.
            await asyncio.sleep(0)
            raise MalformedMessage("the call has no message, or ends within it")
        return await self.parse(call.caller, received, parse)

    def messages(self, call: Call, parse: Parse, max_bytes: int) -> Messages:
        """Those of a stream of requests. As long as it is read it may hold one of the largest that gRPC lets in: it is
        to have a place among `reading`."""
        self._look_later()
        return Messages(call, self, parse, max_bytes)

    async def parse(self, owner: str, message: bytes, parse: Parse) -> Any:
        """In the one thread that does this where it is large, so that not several hold the interpreter for long, one
        after another."""
        if len(message) <= _SMALL_BYTES:
            return parsed(message, parse)
        await self._unparsed.take(owner, len(message))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, _counted_and_parsed, message, parse)
        finally:
            self._unparsed.give_back(owner)

    def cut_off(self, call: Call, error: PhotonError) -> None:
        """End a call from outside its task, which reads."""
        task = asyncio.get_running_loop().create_task(_end(call, error))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _receive(self, call: Call) -> Any:
        self._look_later()
        await self.turns.take(call.caller, connection=call.peer)
        self._receiving[call] = 0
        try:
            # Never cancelled from here: gRPC would go on writing to memory that is gone. To cut it off, the call is
            # ended.
            return await call.context.read()
        finally:
            self._receiving.pop(call, None)
            self.turns.give_back(call.caller)

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
        if self._receiving or self.turns.owners_waiting() or any(places.size for places in self._reading):
            self._look_later()

    def _cut_off_the_slow(self) -> None:
        """Bound the time of a receiver while others wait: one that sends a byte a second would shut them out."""
        for call in tuple(self._receiving):
            num_waiting = self._num_waiting_for(call.caller)
            if not num_waiting:
                continue
            grace_s = _GRACE_S * self._max_receiving / (self._max_receiving + num_waiting)
            self._receiving[call] += 1
            if self._receiving[call] > max(grace_s / _LOOK_INTERVAL_S, _MIN_LOOKS):
                del self._receiving[call]
                message = f"others wait to send; this message took more than {grace_s:.2f} s to arrive"
                self.cut_off(call, QueueFull(message, retry_after_s=RETRY_AFTER_S))

    def _num_waiting_for(self, owner: str) -> int:
        """Call that wait for a turn that `owner` has: its own, and those of owners that have fewer."""
        turns, num_held = self.turns, self.turns.held[owner]
        claiming = [each for each in turns.owners_waiting() if each == owner or turns.held[each] < num_held]
        return sum(map(turns.num_waiting, claiming))

    def _keep_within(self, num_bytes: int) -> None:
        """MAX_HELD_BYTES."""
        surplus = num_bytes - MAX_HELD_BYTES
        self.turns.is_scarce = surplus > 0
        self.turns.call()
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


async def _end(call: Call, error: PhotonError) -> None:
    with contextlib.suppress(grpc.aio.BaseError, asyncio.CancelledError):
        await call.fail(error)


class Messages:
    """Async iterator. After one that cannot be taken, which raises, the next may be asked for. Can hold the place of
    its call."""

    #: Has a request's id in it.
    _NUM_BEGINNING_BYTES = 256

    def __init__(self, call: Call, intake: MessageReceiver, parse: Parse, max_bytes: int) -> None:
        """`max_bytes`: of one of them."""
        self._call = call
        self._intake = intake
        self._parse = parse
        self._max_bytes = max_bytes
        #: Since when the next message is awaited.
        self._since_s: float | None = time.monotonic()
        #: Of the newest message.
        self.beginning = b""

    def idle_since_s(self) -> float | None:
        return self._since_s

    def evict(self, error: PhotonError) -> None:
        """The next message is none: the end."""
        self._intake.cut_off(self._call, error)

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Any:
        """Raise MalformedMessage, InvalidRequest (too large, too many fields), QueueFull."""
        self._since_s = time.monotonic()
        message = await self._call.context.read()
        self._since_s = None
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        self.beginning = message[: self._NUM_BEGINNING_BYTES]
        if len(message) > self._max_bytes:
            text = f"the message has {len(message)} bytes; {self._max_bytes} are allowed in this stream of requests"
            raise InvalidRequest(text, needed=len(message), limit=self._max_bytes)
        return await self._intake.parse(self._call.caller, message, self._parse)


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
