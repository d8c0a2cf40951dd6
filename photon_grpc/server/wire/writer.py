"""Writing of a stream's messages, which cuts off readers that read nothing.

HTTP/2 flow control accepts thousands of small messages for a reader that reads nothing. A stream is bounded here: each
write is awaited before the next message is made, and updates that arrive meanwhile are merged, so they never exceed the
output's text.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from photon_grpc.errors import DeadlinePassed

if TYPE_CHECKING:
    from photon_grpc.server.calls.metadata import Context


class StreamWriter:
    """Writer for all streams of a server. A write that waits longer than `stall_limit_s` for its reader fails."""

    def __init__(self, stall_limit_s: float) -> None:
        self._stall_limit_s = stall_limit_s
        #: Task of a call -> since when it waits for its reader.
        self._waiting: dict[asyncio.Task[Any] | None, float] = {}
        self._stalled: set[asyncio.Task[Any] | None] = set()

    async def write(self, context: Context, message: Any) -> None:
        """Write a message and wait until gRPC has taken it. One write per call at a time. Raise DeadlinePassed."""
        task = asyncio.current_task()
        self._waiting[task] = time.monotonic()
        try:
            await context.write(message)
        except asyncio.CancelledError:
            if task is None or task not in self._stalled:
                raise
            task.uncancel()
            raise DeadlinePassed(f"the client read no message for {self._stall_limit_s:g} s") from None
        finally:
            del self._waiting[task]
            self._stalled.discard(task)

    async def watch(self) -> None:
        """Cut off stalled readers as long as the server runs. A periodic check is cheaper than a timer per message."""
        while True:
            await asyncio.sleep(self._stall_limit_s / 4)
            self._cut_off(time.monotonic() - self._stall_limit_s)

    def _cut_off(self, before_s: float) -> None:
        for task, since_s in self._waiting.items():
            if since_s < before_s and task is not None and task not in self._stalled:
                self._stalled.add(task)
                task.cancel()
