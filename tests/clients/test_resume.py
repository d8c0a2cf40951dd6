"""Two replicas, one of which is killed at random times while streams run. Every stream equals an undisturbed one.

The short form kills a few times, `--attack long` 200 times; figures are in docs/clients.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from photon_grpc import demo
from photon_grpc.client import Client, Delta, Stream, SyncClient
from photon_grpc.client.multiplex import Multiplex
from photon_grpc.client.resume import ResumingCall

from .replicas import replicas, target_of

KILLS = {"short": 3, "long": 200}

#: Each has 150 tokens, long enough to be cut off.
REQUESTS: list[tuple[Any, dict[str, Any]]] = [
    ("def fib(n):", {"temperature": 0, "token_ids": True}),
    ("class Stack:", {"temperature": 1.0, "seed": 1, "top_p": 0.95, "repetition_penalty": 1.1}),
    ("import ", {"temperature": 1.3, "seed": 2, "token_ids": True, "logprobs": 1}),
    ([{"role": "user", "content": "Write a loop."}], {"temperature": 0.8, "seed": 3}),
    ("x = ", {"temperature": 1.0, "seed": 4, "regex": "[a-zéü ]{150}"}),
    ("y = ", {"temperature": 1.2, "seed": 5, "json_schema": '{"type": "array", "items": {"type": "integer"}}'}),
]

Answer = tuple[str, tuple[int, ...], int, str, int, int]


@dataclass
class Tally:
    """Counts of what happened."""

    streams: int = 0
    resumed: int = 0
    different: list[tuple[int, Answer, Answer]] = field(default_factory=list)


@contextmanager
def counted(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count the continuations of all clients."""
    go_on = ResumingCall._continued

    def counting(call: ResumingCall, left_s: float) -> Any:
        tally.resumed += 1
        return go_on(call, left_s)

    with monkeypatch.context() as patch:
        patch.setattr(ResumingCall, "_continued", counting)
        yield


@pytest.mark.timeout(3600)
async def test_a_killed_server_costs_no_token(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (demo.DRAFT / "config.json").is_file():
        pytest.skip("the embedded model is not here")
    kills, tally, draw = KILLS[request.config.getoption("--attack")], Tally(), random.Random(0)
    async with replicas(2) as running:
        target = target_of(running)
        async with Client(target, timeout=900) as client:
            expected = await asyncio.gather(*(undisturbed(client.stream(p, **full(o))) for p, o in REQUESTS))
            with counted(tally, monkeypatch):
                readers = [asyncio.create_task(each) for each in all_readers(client, target, expected, tally)]
                try:
                    for kill in range(kills):
                        await asyncio.sleep(draw.uniform(0.05, 1.0))
                        running[kill % 2].kill()
                        await running[kill % 2].start()
                    while tally.streams < len(readers):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                finally:
                    for reader in readers:
                        reader.cancel()
                    ended = await asyncio.gather(*readers, return_exceptions=True)
    with capsys.disabled():
        print(f"\n{kills} kills, {tally.streams} streams, {tally.resumed} continuations, {len(tally.different)} differ")
    assert [each for each in ended if not isinstance(each, asyncio.CancelledError)] == []
    assert [difference(*each) for each in tally.different] == []
    assert tally.resumed >= kills


def full(options: dict[str, Any]) -> Any:
    # JSON and regular expressions end by themselves; the others end at the limit.
    ends = "regex" in options or "json_schema" in options
    return {"max_tokens": 150} | options | ({} if ends else {"ignore_eos": True})


async def undisturbed(stream: Stream) -> Answer:
    return answer([delta async for delta in stream], stream)


def answer(deltas: list[Delta], stream: Any) -> Answer:
    """Return all that a caller sees of a stream."""
    text = "".join(delta.text for delta in deltas)
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    scored = sum(len(delta.scores) for delta in deltas)
    reasons = ",".join(delta.finish.reason for delta in deltas if delta.finish)
    return text, ids, scored, reasons, stream.usage.prompt_tokens, stream.usage.output_tokens


def difference(number: int, found: Answer, expected: Answer) -> str:
    """Describe a difference: the request, the position, and the lengths."""
    at = next((at for at, (one, other) in enumerate(zip(found[0], expected[0], strict=False)) if one != other), -1)
    texts = f"{found[0][at : at + 40]!r} not {expected[0][at : at + 40]!r}"
    return f"request {number} at {at}: {texts}; {found[2:]} not {expected[2:]}"


def all_readers(client: Client, target: str, expected: list[Answer], tally: Tally) -> Iterator[Any]:
    """Start endless readers of single streams, of multiplexed streams, and of a thread's streams."""
    for first in (0, 2, 4):
        yield reader(client, first, expected, tally)
    yield multiplexed_reader(client, expected, tally)
    yield synchronous_reader(target, expected, tally)


async def reader(source: Client | Multiplex, first: int, expected: list[Answer], tally: Tally) -> None:
    async for number, stream in endless(source, first):
        compare(number, await undisturbed(stream), expected, tally)


async def multiplexed_reader(client: Client, expected: list[Answer], tally: Tally) -> None:
    async with client.multiplex() as many:
        await asyncio.gather(*(reader(many, first, expected, tally) for first in (1, 3)))


async def synchronous_reader(target: str, expected: list[Answer], tally: Tally) -> None:
    def one(number: int) -> Answer:
        prompt, options = REQUESTS[number]
        stream = client.stream(prompt, **full(options))
        return answer(list(stream), stream)

    with SyncClient(target, timeout=900) as client:
        number = 5
        while True:
            compare(number, await asyncio.to_thread(one, number), expected, tally)
            number = (number + 1) % len(REQUESTS)


async def endless(source: Client | Multiplex, first: int) -> AsyncIterator[tuple[int, Stream]]:
    number = first
    while True:
        prompt, options = REQUESTS[number]
        yield number, source.stream(prompt, **full(options))
        number = (number + 1) % len(REQUESTS)


def compare(number: int, found: Answer, expected: list[Answer], tally: Tally) -> None:
    tally.streams += 1
    if found != expected[number]:
        tally.different.append((number, found, expected[number]))
