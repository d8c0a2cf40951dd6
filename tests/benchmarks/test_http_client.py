"""The HTTP client of the serving benchmark, against a server that says what a script says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import pytest

from benchmarks.http_client import over_http
from photon_grpc.cli.load.load import Session, Turn, Workload
from photon_grpc.cli.load.load_client import TurnResult

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps({"id": "c", **fields}, separators=(",", ":")).encode() + b"\n\n"


FIRST = event(choices=[{"text": 'a"choices":[],"usage":'}])
SECOND = event(choices=[{"text": "\n\n", "finish_reason": "length"}])
LAST = event(usage=USAGE, choices=[])
DONE = b"data: [DONE]\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


ANSWER = HEAD + chunked(b": waiting\n\n", FIRST[:10], FIRST[10:], SECOND + LAST[:-1], LAST[-1:] + DONE)


class Scripted:
    """A server that gives each request the next answer; after None it closes the connection unanswered."""

    def __init__(self, answers: Sequence[bytes | None], piece_bytes: int) -> None:
        self._answers = list(answers)
        self._piece_bytes = piece_bytes
        self.num_connections = 0
        self.bodies: list[dict[str, object]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                for start in range(0, len(answer), self._piece_bytes):
                    writer.write(answer[start : start + self._piece_bytes])
                    await asyncio.sleep(0)
                if b"connection: close" in answer:
                    break
        writer.close()


async def asked(answers: Sequence[bytes | None], piece_bytes: int = 1 << 20) -> tuple[list[TurnResult], Scripted]:
    """Return what came of as many requests, one after another."""
    scripted = Scripted(answers, piece_bytes)
    async with serving(scripted) as target:
        load = Workload(target, [Session([Turn([1, 2, 3], 2)])], salt="s", timeout_s=10.0)
        async with over_http(load) as ask:
            return [await ask(load.sessions[0].turns[0], None) for _ in answers], scripted


@contextlib.asynccontextmanager
async def serving(scripted: Scripted) -> AsyncIterator[str]:
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1 << 20])
async def test_an_event_with_text_is_a_message_however_it_is_cut(piece_bytes: int) -> None:
    endings, scripted = await asked([ANSWER, ANSWER], piece_bytes)
    for ending in endings:
        assert len(ending.times_s) == 2
        assert ending.sent_s <= ending.times_s[0] <= ending.times_s[1]
        assert (ending.prompt_tokens, ending.cached_prompt_tokens, ending.output_tokens) == (3, 1, 2)
        assert ending.reason == ""
    assert scripted.num_connections == 1
    assert [body["prompt"] for body in scripted.bodies] == [[1, 2, 3]] * 2
    assert {(body["max_tokens"], body["ignore_eos"], body["cache_salt"]) for body in scripted.bodies} == {
        (2, True, "s")
    }


async def test_failures_have_the_reason_that_the_server_sends() -> None:
    error = json.dumps({"error": {"code": "QUEUE_FULL", "message": "full"}}).encode()
    refused = b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n%b" % (len(error), error)
    failed = HEAD + chunked(FIRST, b"data: " + error + b"\n\n")
    cut_off = HEAD + chunked(FIRST)
    endings, _ = await asked([refused, failed, cut_off, ANSWER])
    assert [ending.reason for ending in endings] == ["QUEUE_FULL", "QUEUE_FULL", "CUT_OFF", ""]
    assert [len(ending.times_s) for ending in endings] == [0, 1, 1, 2]


async def test_a_lost_connection_fails_its_request_and_no_other() -> None:
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + ANSWER.split(b"\r\n", 1)[1]
    endings, scripted = await asked([ANSWER, None, closing, ANSWER])
    assert [ending.reason for ending in endings] == ["", "UNAVAILABLE", "", ""]
    assert scripted.num_connections == 3


async def test_without_a_server_every_request_fails() -> None:
    async with serving(Scripted([], 1)) as target:
        pass
    load = Workload(target, [Session([Turn([1], 2)])], timeout_s=10.0)
    async with over_http(load) as ask:
        assert (await ask(load.sessions[0].turns[0], None)).reason == "UNAVAILABLE"
