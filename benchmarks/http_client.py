"""One client process of a load over HTTP: `photon_grpc/cli/load/load.py` starts it in place of the one for gRPC.

Every slot has a connection of its own, as HTTP/1.1 needs, and reads server-sent events of `/v1/completions`: ids in,
text out. The parser is httptools', and no event is parsed as JSON unless it begins or ends an answer, so that a message
costs the client a few microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import httptools

from photon_grpc.cli.load.load import Turn, Workload
from photon_grpc.cli.load.load_client import Ask, TurnResult, main

_EVENT = b"data: "
_FIRST = b'data: {"id"'
_END = b"data: [DONE]"
_USAGE = b'"choices":[]'


class Stream(asyncio.Protocol):
    """One connection, which carries one answer at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self.times_s: list[float] = []
        self.usage: dict[str, Any] = {}
        self.failure = ("", "")
        self._is_done = False
        self._ended: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> None:
        """Send a request and read its answer to the end."""
        assert self._transport is not None
        self.times_s, self.usage, self.failure = [], {}, ("", "")
        self._rest, self._is_done = b"", False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._fail("UNAVAILABLE", f"the connection was lost: {error or 'closed by the server'}")
            self._end()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("MALFORMED_ANSWER", str(error))
            self.close()

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        now_s = time.perf_counter()
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if not event.startswith(_EVENT):
                continue  # a comment
            if event.startswith(_FIRST) and _USAGE not in event:
                self.times_s.append(now_s)
            else:
                self._last(event)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._last(_EVENT + self._rest)
            self._fail("HTTP", f"status {status}")
        elif not self._is_done:
            self._fail("CUT_OFF", "the answer ended without [DONE]")
        self._end()
        if not self._parser.should_keep_alive():
            self.close()

    def _last(self, event: bytes) -> None:
        """Read the usage, the end or a failure."""
        if event == _END:
            self._is_done = True
            return
        with contextlib.suppress(ValueError):
            value = json.loads(event[len(_EVENT) :])
            if error := value.get("error"):
                self._fail(error["code"], error["message"])
            self.usage = value.get("usage", {})

    def _fail(self, reason: str, message: str) -> None:
        self.failure = self.failure if self.failure[0] else (reason, message)

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class HttpCalls:
    """The requests of a load, each over a connection that no other uses meanwhile."""

    def __init__(self, load: Workload) -> None:
        if load.multiplex or not load.text or load.bypass_prefix_cache:
            raise ValueError("multiplex, ids as output and bypassing the cache are of gRPC only")
        self._load = load
        self._host, _, port = load.target.rpartition(":")
        self._port = int(port)
        self._idle: list[Stream] = []

    async def open(self, num_streams: int) -> None:
        self._idle = list(await asyncio.gather(*(self._connect() for _ in range(num_streams))))

    def close(self) -> None:
        for stream in self._idle:
            stream.close()

    async def ask(self, turn: Turn, history: list[int] | None) -> TurnResult:
        if history is not None:
            raise ValueError("a conversation needs the ids of its answers, which the completions of HTTP do not have")
        request = self._request(turn)
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._load.timeout_s):
                stream = await self._free()
                try:
                    await stream.ask(request)
                except BaseException:
                    stream.close()
                    raise
        except (OSError, TimeoutError) as error:
            return TurnResult(sent_s, [], reason="UNAVAILABLE", message=f"{type(error).__name__}: {error}")
        self._idle.append(stream)
        usage = stream.usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        tokens = (usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))
        return TurnResult(sent_s, stream.times_s, *tokens, *stream.failure)

    async def _free(self) -> Stream:
        while self._idle:
            if (stream := self._idle.pop()).is_open:
                return stream
        return await self._connect()

    async def _connect(self) -> Stream:
        _, stream = await asyncio.get_running_loop().create_connection(Stream, self._host, self._port)
        return stream

    def _request(self, turn: Turn) -> bytes:
        load = self._load
        fields = {
            "prompt": turn.prompt,
            "max_tokens": turn.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "model": load.model or None,
            "cache_salt": load.salt or None,
            "logprobs": load.logprobs,
        }
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {load.target}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def over_http(load: Workload) -> AsyncIterator[Ask]:
    """Connect every session that begins at the start."""
    calls = HttpCalls(load)
    at_start = sum(session.start_s == 0 for session in load.sessions)
    # If there is no server, every request fails with the reason.
    with contextlib.suppress(OSError):
        await calls.open(min(load.concurrency or at_start, at_start))
    try:
        yield calls.ask
    finally:
        calls.close()


if __name__ == "__main__":
    main(over_http)
