"""Server-sent events, with a comment line whenever nothing was sent for a while.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.types import Send

#: Proxies close streams that are silent for 30 to 60 s.
SILENCE_S = 15.0
_COMMENT = b": waiting\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx buffers answers unless this says no.
    "x-accel-buffering": "no",
}


class Events:
    """The events of one answer. The status goes out with the first one, so that a refusal still has its own."""

    def __init__(self, send: Send, silence_s: float = SILENCE_S) -> None:
        """Write by the ASGI `send`."""
        self._send = send
        self._silence_s = silence_s
        self._headers: dict[str, str] = {}
        self._last_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self.has_begun = False

    def prepare(self, headers: Mapping[str, str]) -> None:
        """Add headers to those of the answer, before the first event."""
        self._headers.update(headers)

    async def write(self, events: bytes) -> None:
        """Send whole events, and wait while the reader is behind."""
        if not self.has_begun:
            await self._begin()
        self._last_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def close(self) -> None:
        """End the answer."""
        self.stop()
        if not self.has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def stop(self) -> None:
        """Send no more comments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comment is not None:
            self._comment.cancel()

    async def _begin(self) -> None:
        self.has_begun = True
        headers = [
            (name.encode("latin-1"), text.encode("latin-1")) for name, text in (_HEADERS | self._headers).items()
        ]
        self._rest()
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _rest(self) -> None:
        """Look again when the silence would have lasted too long."""
        silent_s = time.monotonic() - self._last_s if self._last_s else 0.0
        self._timer = asyncio.get_running_loop().call_later(max(self._silence_s - silent_s, 0.01), self._look)

    def _look(self) -> None:
        is_waiting = self._comment is not None and not self._comment.done()
        if not is_waiting and time.monotonic() - self._last_s >= self._silence_s:
            self._comment = asyncio.get_running_loop().create_task(self.write(_COMMENT))
        self._rest()
