"""Writes a stream's messages, and cuts off readers that take none.

HTTP/2 flow control lets thousands of small messages be written for a reader that reads nothing. What bounds a stream is above it:
one write is awaited before the next message is made, and what gathers meanwhile is merged, never more than the output's own text.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from photon_grpc.server import metadata
from photon_grpc.server.metadata import Context

_log = logging.getLogger(__name__)


class StreamWriter:
    """Writes for all streams of a server. A write that waits longer than `stall_limit_s` for its reader ends the call."""

    def __init__(self, stall_limit_s: float) -> None:
        self._stall_limit_s = stall_limit_s
        self._waiting: dict[asyncio.Task[Any], tuple[float, str]] = {}

    async def write(self, context: Context, message: Any) -> None:
        """Returns when gRPC has taken the message. At most one write per call at a time."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = (loop.time(), metadata.request_id())
        try:
            await context.write(message)
        finally:
            del self._waiting[task]

    async def watch(self) -> None:
        """Runs as long as the server does."""
        while True:
            await asyncio.sleep(self._stall_limit_s / 4)
            self._cut_off(asyncio.get_running_loop().time() - self._stall_limit_s)

    def _cut_off(self, before_s: float) -> None:
        for task, (since_s, request_id) in list(self._waiting.items()):
            if since_s < before_s:
                _log.warning("%s", json.dumps({"event": "reader stalled, call cut off", "request_id": request_id}))
                # The handler closes its stream and the call is reset: a status could not reach this reader anyway.
                task.cancel()
