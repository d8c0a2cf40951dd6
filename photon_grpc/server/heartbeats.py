"""Heartbeats of a request: messages without tokens before its first token, for proxies that close an idle stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from photon_grpc.frontend.stream import TokenStream
from photon_grpc.v1 import inference_pb2 as pb


async def begun(
    admission: Coroutine[Any, Any, TokenStream], interval_s: float, send: Callable[[], Awaitable[None]]
) -> TokenStream:
    """Return the stream that `admission` gives, once it has something to read or has failed.

    Until then call `send` whenever nothing was sent for `interval_s`. Raise what `admission` and `send` raise.
    """
    beats = _ActiveHeartbeats(interval_s, send)
    admitted = asyncio.create_task(admission)
    try:
        await beats.until(admitted)
    except BaseException as error:
        await _abandon(admitted, error)
        raise
    stream = admitted.result()
    try:
        await beats.until(_something_in(stream))
    except BaseException as error:
        stream.close(error)
        raise
    return stream


class _ActiveHeartbeats:
    """Heartbeats sent by the task that also writes the messages, since a call has one write at a time."""

    def __init__(self, interval_s: float, send: Callable[[], Awaitable[None]]) -> None:
        self._interval_s = interval_s
        self._send = send
        self._due_s = time.monotonic() + interval_s

    async def until(self, awaited: asyncio.Future[Any]) -> None:
        while not (await asyncio.wait((awaited,), timeout=max(self._due_s - time.monotonic(), 0.0)))[0]:
            await self._send()
            self._due_s = time.monotonic() + self._interval_s


async def _abandon(admitted: asyncio.Task[TokenStream], error: BaseException) -> None:
    """End an admission whose call has ended. Its stream, if there is one already, has no other owner."""
    # A callback, since the call may be cancelled again while this waits.
    admitted.add_done_callback(lambda done: _close_result(done, error))
    admitted.cancel()
    await asyncio.wait((admitted,))


def _close_result(admitted: asyncio.Task[TokenStream], error: BaseException) -> None:
    if not admitted.cancelled() and admitted.exception() is None:
        admitted.result().close(error)


def _something_in(stream: TokenStream) -> asyncio.Future[None]:
    due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream.call_when_due(lambda: None if due.done() else due.set_result(None))
    return due


class NoHeartbeats:
    """No heartbeats."""

    is_due = False

    def restart(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Heartbeats(NoHeartbeats):
    """The heartbeats of one request on a shared stream."""

    def __init__(self, interval_s: float, on_due: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._on_due = on_due
        self.restart()

    def restart(self) -> None:
        """Count the interval from now, when something is sent."""
        self.is_due = False
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._ring)

    def stop(self) -> None:
        """Have no more; the first token or the end is sent."""
        self.is_due = False
        self._timer.cancel()

    def _ring(self) -> None:
        self.is_due = True
        self._on_due()


NO_HEARTBEATS = NoHeartbeats()


def heartbeats_of(request: pb.GenerateRequest, on_due: Callable[[], None]) -> NoHeartbeats:
    """Return the heartbeats of a request that is about to be checked."""
    if not (request.HasField("stream") and request.stream.HasField("heartbeat_interval")):
        return NO_HEARTBEATS
    interval = request.stream.heartbeat_interval
    return Heartbeats(interval.seconds + interval.nanos * 1e-9, on_due)
