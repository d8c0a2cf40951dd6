"""Receiving of messages, within the memory that all of them may hold.

A call whose message is not read yet holds at most an HTTP/2 window of it. Once it is read, gRPC may hold all of it
before Python sees a byte. So only a few calls with a single message receive at a time, and streams of requests, whose
messages are received one after another, are ended when their common memory is used up. Large messages are parsed one
at a time in a thread.
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

from photon_grpc.access.held_memory import HeldMemory, give_back_freed
from photon_grpc.access.places import Places, SharedTurns, WaitingPlaces
from photon_grpc.errors import RETRY_AFTER_S, InvalidRequest, MalformedMessage, PhotonError, QueueFull
from photon_grpc.server.calls.call import Call
from photon_grpc.server.wire.fields import count_fields

MAX_RECEIVING = 10
#: One in this many turns is reserved: a single owner never holds it.
_RESERVED_SHARE = 5
MAX_UNPARSED_BYTES = 2**27
#: Messages up to this size are parsed on the event loop, in less than a millisecond.
_SMALL_BYTES = 16 * 1024
#: Calls that wait to send their message. Each costs at most a window.
MAX_WAITING = 1024
#: Memory of this process above its level at rest. Beyond it streams of requests are ended, and one message is received
#: at a time.
MAX_HELD_BYTES = 5 * 2**27
#: One stream is ended for every such piece above MAX_HELD_BYTES.
_LARGE_BYTES = 2**25
#: Interval of checks once half of MAX_HELD_BYTES is held, since a gigabyte may arrive per second.
_QUICK_CHECK_INTERVAL_S = 0.01
#: Checks to wait until an ended stream has freed its memory.
_CHECKS_AFTER_END = 3
#: Time for a message while others wait. It shrinks as their number grows.
_GRACE_S = 1.0
_CHECK_INTERVAL_S = 0.05
#: Interval between counts of the memory until half of MAX_HELD_BYTES is held. A count takes 2 ms beside 256 streams,
#: and in this time a gigabyte per second brings less than the other half.
_COUNT_INTERVAL_S = 0.25
_MIN_CHECKS = 2

Parse = Callable[[bytes], Any]


class MessageReceiver:
    """Receives and parses the messages of all calls. Belongs to one event loop."""

    def __init__(
        self,
        reading: Sequence[Places] = (),
        *,
        max_receiving: int = MAX_RECEIVING,
        max_unparsed_bytes: int = MAX_UNPARSED_BYTES,
        memory: HeldMemory | None = None,
    ) -> None:
        """Take the limits, and in `reading` the places of streams of requests, in the order in which they are shed."""
        self._reading = reading
        self._max_receiving = max_receiving
        self.turns = SharedTurns(
            max_receiving,
            WaitingPlaces("calls that wait to send their message", MAX_WAITING, retry_after_s=RETRY_AFTER_S),
            num_reserved=max_receiving // _RESERVED_SHARE,
            is_newest_first=True,
        )
        #: Call -> checks that found it receiving while others waited. No time, since a late event loop receives late.
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
        self._next_cut_s = self._next_count_s = 0.0
        self._num_checks_to_wait = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ends: set[asyncio.Task[None]] = set()

    async def message(self, call: Call, parse: Parse) -> Any:
        """Return the only message.

        Raise MalformedMessage (also without one), InvalidRequest, FeatureNotSupported (an unknown field), QueueFull.
        """
        received = await self._receive(call)
        if received is grpc.aio.EOF:
            # A cancelled call also reads EOF; its task is about to be cancelled.
            await asyncio.sleep(0)
            raise MalformedMessage("the call has no message, or ends within it")
        return await self.parse(call.caller, received, parse)

    def messages(self, call: Call, parse: Parse, max_bytes: int) -> Messages:
        """Return a stream's messages. Its call must have a place among `reading`, since each may be of any size."""
        self._schedule_check()
        return Messages(call, self, parse, max_bytes)

    async def parse(self, owner: str, message: bytes, parse: Parse) -> Any:
        """Parse a message; a large one in the only parsing thread, since several would hold the interpreter in turn."""
        if len(message) <= _SMALL_BYTES:
            return parsed(message, parse)
        await self._unparsed.take(owner, len(message))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, _counted_and_parsed, message, parse)
        finally:
            self._unparsed.give_back(owner)

    def cut_off(self, call: Call, error: PhotonError) -> None:
        """End a call from outside its task, which is reading."""
        task = asyncio.get_running_loop().create_task(_end(call, error))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _receive(self, call: Call) -> Any:
        self._schedule_check()
        await self.turns.take(call.caller, connection=call.peer)
        self._receiving[call] = 0
        try:
            # Never cancelled from here, since gRPC would write to freed memory; `cut_off` ends the call instead.
            return await call.context.read()
        finally:
            self._receiving.pop(call, None)
            self.turns.give_back(call.caller)

    # The timer runs while anything is received.

    def _schedule_check(self) -> None:
        if self._timer is None:
            interval_s = _QUICK_CHECK_INTERVAL_S if self._is_much_held else _CHECK_INTERVAL_S
            self._timer = asyncio.get_running_loop().call_later(interval_s, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if now_s >= self._next_cut_s:
            self._next_cut_s = now_s + _CHECK_INTERVAL_S
            self._cut_off_slow_calls()
        if self._is_much_held or now_s >= self._next_count_s:
            self._next_count_s = now_s + _COUNT_INTERVAL_S
            self._count_memory()
        if self._receiving or self.turns.owners_waiting() or any(places.size for places in self._reading):
            self._schedule_check()

    def _count_memory(self) -> None:
        num_bytes = self._memory.num_bytes()
        self._is_much_held = num_bytes > MAX_HELD_BYTES // 2
        self._limit_memory(num_bytes)
        self._give_back(num_bytes)

    def _cut_off_slow_calls(self) -> None:
        """Limit how long a call receives while others wait: one that sends a byte per second would shut them out."""
        for call in tuple(self._receiving):
            num_waiting = self._num_waiting_for(call.caller)
            if not num_waiting:
                continue
            grace_s = _GRACE_S * self._max_receiving / (self._max_receiving + num_waiting)
            self._receiving[call] += 1
            if self._receiving[call] > max(grace_s / _CHECK_INTERVAL_S, _MIN_CHECKS):
                del self._receiving[call]
                message = f"other calls are waiting to send; this message took more than {grace_s:.2f} s to arrive"
                self.cut_off(call, QueueFull(message, retry_after_s=RETRY_AFTER_S))

    def _num_waiting_for(self, owner: str) -> int:
        """Count the calls that wait for a turn of `owner`: its own, and those of owners that hold fewer."""
        turns, num_held = self.turns, self.turns.held[owner]
        claiming = [each for each in turns.owners_waiting() if each == owner or turns.held[each] < num_held]
        return sum(map(turns.num_waiting, claiming))

    def _limit_memory(self, num_bytes: int) -> None:
        """End streams, and receive one message at a time, while more than MAX_HELD_BYTES are held."""
        surplus = num_bytes - MAX_HELD_BYTES
        self.turns.is_scarce = surplus > 0
        self.turns.wake()
        self._num_checks_to_wait -= self._num_checks_to_wait > 0
        if surplus > 0 and not self._num_checks_to_wait:
            self._num_checks_to_wait = _CHECKS_AFTER_END
            for _ in range(1 + surplus // _LARGE_BYTES):
                self._end_a_stream()

    def _end_a_stream(self) -> None:
        """End an idle stream, or a busy one if none is idle; which of them hold memory is unknown."""
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
    """An async iterator over a stream of requests, for its call's place. It continues after a refused message."""

    #: Enough to contain the request id.
    _NUM_BEGINNING_BYTES = 256

    def __init__(self, call: Call, receiver: MessageReceiver, parse: Parse, max_bytes: int) -> None:
        """Read from `call`; `max_bytes` limits each message."""
        self._call = call
        self._receiver = receiver
        self._parse = parse
        self._max_bytes = max_bytes
        #: Since when the next message is awaited; None while one is processed.
        self._since_s: float | None = time.monotonic()
        #: The first bytes of the newest message.
        self.beginning = b""

    def idle_since_s(self) -> float | None:
        return self._since_s

    def evict(self, error: PhotonError) -> None:
        """End the call with `error`; the next read then returns EOF."""
        self._receiver.cut_off(self._call, error)

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Any:
        """Return the next message.

        Raise MalformedMessage, InvalidRequest (too large, too many fields), FeatureNotSupported (an unknown field),
        QueueFull.
        """
        self._since_s = time.monotonic()
        message = await self._call.context.read()
        self._since_s = None
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        self.beginning = message[: self._NUM_BEGINNING_BYTES]
        if len(message) > self._max_bytes:
            text = f"the message has {len(message)} bytes; {self._max_bytes} are allowed in this stream of requests"
            raise InvalidRequest(text, needed=len(message), limit=self._max_bytes)
        return await self._receiver.parse(self._call.caller, message, self._parse)


def parsed(message: bytes, parse: Parse) -> Any:
    """Return the parsed message. Raise MalformedMessage, and what `parse` raises for fields that it refuses."""
    try:
        return parse(message)
    except DecodeError:
        raise MalformedMessage("the bytes are not a message of this method, or a string in them is not UTF-8") from None


def _counted_and_parsed(message: bytes, parse: Parse) -> Any:
    empty = parsed(b"", parse)
    if hasattr(empty, "DESCRIPTOR"):
        count_fields(message, empty.DESCRIPTOR)
    return parsed(message, parse)
