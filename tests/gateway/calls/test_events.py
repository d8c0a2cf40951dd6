"""Server-sent events: the status with the first one, comments in silence, one end."""

from __future__ import annotations

import asyncio
from typing import Any

from photon_grpc.gateway.calls.events import Events


class Sent:
    """An ASGI `send` that keeps what was sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.came = asyncio.Event()

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)
        self.came.set()

    async def comments(self, count: int) -> None:
        """Wait for that many comment lines."""
        while self.body.count(b": waiting\n\n") < count:
            self.came.clear()
            await self.came.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    def header(self, name: str) -> str | None:
        return dict(self.messages[0]["headers"]).get(name.encode(), b"").decode() or None


async def test_nothing_is_sent_before_the_first_event() -> None:
    sent = Sent()
    events = Events(sent)
    events.prepare({"x-request-id": "r1"})
    assert sent.messages == [] and not events.has_begun
    await events.write(b"data: 1\n\n")
    await events.close()
    assert [message["type"] for message in sent.messages] == ["http.response.start"] + ["http.response.body"] * 2
    assert sent.messages[0]["status"] == 200 and sent.messages[-1]["more_body"] is False
    assert (sent.header("cache-control"), sent.header("x-accel-buffering")) == ("no-cache", "no")
    assert sent.header("x-request-id") == "r1"


async def test_silence_is_filled_with_comments_once_output_has_begun() -> None:
    sent = Sent()
    events = Events(sent, silence_s=0.02)
    await asyncio.sleep(0.1)
    assert sent.messages == []
    await events.write(b"data: 1\n\n")
    await asyncio.wait_for(sent.comments(2), 120)
    await events.write(b"data: 2\n\n")
    await events.close()
    assert sent.body.replace(b": waiting\n\n", b"") == b"data: 1\n\ndata: 2\n\n"


async def test_an_ended_answer_gets_no_comments() -> None:
    sent = Sent()
    events = Events(sent, silence_s=0.01)
    await events.write(b"data: 1\n\n")
    await events.close()
    await asyncio.sleep(0.05)
    assert sent.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
