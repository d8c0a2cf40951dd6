"""Receives messages: the one of a call, few calls at a time; those of a stream of requests, one after another. Large
ones are parsed one at a time, beside the loop.

A call whose message is not read holds no more of it than an HTTP/2 window.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from photon_grpc.errors import InvalidRequest, MalformedMessage, QueueFull
from photon_grpc.server.metadata import Context
from photon_grpc.server.wire import count_fields

MAX_RECEIVING = 8
MAX_UNPARSED_BYTES = 2**27
#: Parsed where it was received: less than a millisecond for what any field holds.
_SMALL_BYTES = 16 * 1024
#: Calls that wait to send theirs; each costs a window at most.
MAX_WAITING = 1024
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
    fail: Fail
    #: Of the call's own task.
    variables: contextvars.Context
    #: Times it was seen while others waited. Not by a clock: a late loop receives late.
    num_looks: int = 0


class Intake:
    """Belongs to one event loop."""

    def __init__(self, *, max_receiving: int = MAX_RECEIVING, max_unparsed_bytes: int = MAX_UNPARSED_BYTES) -> None:
        self._max_receiving = max_receiving
        self._num_free = max_receiving
        #: Connection -> its calls that wait, the oldest first. The first connection is the next one served.
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._num_waiting = 0
        self._receiving: dict[Context, _Receiving] = {}
        self._look: asyncio.TimerHandle | None = None
        self._cuts: set[asyncio.Task[None]] = set()
        self._max_unparsed_bytes = max_unparsed_bytes
        self._num_unparsed_bytes = 0
        self._thread = ThreadPoolExecutor(1, "parse")

    async def message(self, context: Context, parse: Parse, fail: Fail) -> Any:
        """The call's one message. Raise MalformedMessage (also where there is none), InvalidRequest (too many fields),
        QueueFull."""
        received = await self._receive(context, fail)
        if received is grpc.aio.EOF:
            # A cancelled call ends so too; its task is about to be told.
            await asyncio.sleep(0)
            raise MalformedMessage("the call has no message, or ends within it")
        return await self._parse(parse, received)

    def messages(self, context: Context, parse: Parse, max_bytes: int) -> Messages:
        """Those of a stream of requests. As long as it is read it may hold one of the largest that gRPC lets in: let
        few such calls be open."""
        return Messages(context, partial(self._parse, parse), max_bytes)

    async def _parse(self, parse: Parse, message: bytes) -> Any:
        return parsed(message, parse) if len(message) <= _SMALL_BYTES else await self._parse_beside(message, parse)

    async def _receive(self, context: Context, fail: Fail) -> Any:
        await self._permit(context.peer())
        self._receiving[context] = _Receiving(fail, contextvars.copy_context())
        try:
            # Never cancelled from here: gRPC would go on writing to memory that is gone. To cut it off, the call is
            # ended.
            return await context.read()
        finally:
            self._receiving.pop(context, None)
            self._release()

    async def _permit(self, connection: str) -> None:
        """Wait for a turn. Connections take turns, so that one with endless calls shuts out only its own; of one
        connection the newest call is first: a small message does not wait for a hundred large ones. Raise QueueFull."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        calls = self._waiting.setdefault(connection, [])
        calls.append(turn)
        self._num_waiting += 1
        self._refuse_surplus()
        self._look_later()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(connection, turn)
            else:
                self._release()
            raise

    def _refuse_surplus(self) -> None:
        """The oldest call of the connection that has the most of them."""
        if self._num_waiting <= MAX_WAITING:
            return
        calls = max(self._waiting.values(), key=len)
        message = f"{self._num_waiting} calls wait to send their message; {MAX_WAITING} may"
        oldest = next((turn for turn in calls if not turn.done()), None)
        if oldest is not None:
            calls.remove(oldest)
            self._num_waiting -= 1
            oldest.set_exception(
                QueueFull(message, needed=MAX_WAITING + 1, limit=MAX_WAITING, retry_after_s=_RETRY_AFTER_S)
            )

    def _forget(self, connection: str, turn: asyncio.Future[None]) -> None:
        calls = self._waiting.get(connection, [])
        if turn in calls:
            calls.remove(turn)
            self._num_waiting -= 1
        if not calls:
            self._waiting.pop(connection, None)

    def _release(self) -> None:
        for connection in tuple(self._waiting):
            calls = self._waiting.pop(connection)
            if turn := next((turn for turn in reversed(calls) if not turn.done()), None):
                calls.remove(turn)
                self._num_waiting -= 1
                turn.set_result(None)
            if calls:  # behind all others
                self._waiting[connection] = calls
            if turn is not None:
                return
        self._num_free += 1

    def _look_later(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_INTERVAL_S, self._cut_off_the_slow)

    def _cut_off_the_slow(self) -> None:
        """Bound the time of a receiver while others wait: one that sends a byte a second would shut them out."""
        self._look = None
        if not self._num_waiting:
            return
        grace_s = _GRACE_S * self._max_receiving / (self._max_receiving + self._num_waiting)
        for context, call in tuple(self._receiving.items()):
            call.num_looks += 1
            if call.num_looks > max(grace_s / _LOOK_INTERVAL_S, _MIN_LOOKS):
                del self._receiving[context]
                cut = asyncio.get_running_loop().create_task(_cut_off(call, grace_s), context=call.variables)
                self._cuts.add(cut)
                cut.add_done_callback(self._cuts.discard)
        self._look_later()

    async def _parse_beside(self, message: bytes, parse: Parse) -> Any:
        """In the one thread that does this, so that not several hold the interpreter for long, one after another."""
        needed = self._num_unparsed_bytes + len(message)
        if self._num_unparsed_bytes and needed > self._max_unparsed_bytes:
            text = f"{self._num_unparsed_bytes} bytes of messages wait to be parsed; {self._max_unparsed_bytes} may"
            raise QueueFull(text, needed=needed, limit=self._max_unparsed_bytes, retry_after_s=_RETRY_AFTER_S)
        self._num_unparsed_bytes = needed
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, _counted_and_parsed, message, parse)
        finally:
            self._num_unparsed_bytes -= len(message)


class Messages:
    """Async iterator. After one that cannot be taken, which raises, the next may be asked for."""

    #: Has a request's id in it.
    _NUM_BEGINNING_BYTES = 256

    def __init__(self, context: Context, parse: Callable[[bytes], Awaitable[Any]], max_bytes: int) -> None:
        self._context = context
        self._parse = parse
        self._max_bytes = max_bytes
        #: Of the newest message.
        self.beginning = b""

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Any:
        """Raise MalformedMessage, InvalidRequest (too large, too many fields), QueueFull."""
        message = await self._context.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        self.beginning = message[: self._NUM_BEGINNING_BYTES]
        if len(message) > self._max_bytes:
            text = f"the message has {len(message)} bytes; {self._max_bytes} are allowed in this stream of requests"
            raise InvalidRequest(text, needed=len(message), limit=self._max_bytes)
        return await self._parse(message)


def parsed(message: bytes, parse: Parse) -> Any:
    """Raise MalformedMessage."""
    try:
        return parse(message)
    except DecodeError:
        raise MalformedMessage("the bytes are no message of this method, or a string in them is no UTF-8") from None


def _counted_and_parsed(message: bytes, parse: Parse) -> Any:
    empty = parsed(b"", parse)
    if hasattr(empty, "DESCRIPTOR"):
        count_fields(message, empty.DESCRIPTOR)
    return parsed(message, parse)


async def _cut_off(call: _Receiving, grace_s: float) -> None:
    message = f"others wait to send; this message took more than {grace_s:.2f} s to arrive"
    with contextlib.suppress(grpc.aio.BaseError, asyncio.CancelledError):
        await call.fail(QueueFull(message, retry_after_s=_RETRY_AFTER_S))
