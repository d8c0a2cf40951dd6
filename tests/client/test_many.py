"""Many prompts at a bounded concurrency, and one prompt sent twice."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from photon_grpc import errors
from photon_grpc.client import Client, SyncClient, many
from photon_grpc.client.many import ordered, unordered
from photon_grpc.v1 import inference_pb2 as pb

from .fake_server import FakeServer, Refusal, error_info, message, serving, serving_in_a_thread

EOS = pb.FINISH_REASON_EOS


class Echo(FakeServer):
    """A server that answers with the prompt, `room` at a time; "slow" takes until another has ended."""

    def __init__(self, room: int = 1000) -> None:
        super().__init__()
        self.room = room
        self.running = self.most = self.refused = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        if self.running >= self.room:
            self.refused += 1
            full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [error_info("QUEUE_FULL")])
            await context.abort(full.code, full.message, (*full.all_trailers(), ("grpc-retry-pushback-ms", "5")))
        if request.text == "bad":
            bad = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "bad", [error_info("INVALID_REQUEST")])
            await context.abort(bad.code, bad.message, bad.all_trailers())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.05 if request.text == "slow" else 0.002)
        finally:
            self.running -= 1
        response = pb.GenerateResponse()
        response.outputs.add(text=request.text).finish.reason = EOS
        return response


async def test_results_come_in_the_order_of_the_prompts() -> None:
    prompts = ["slow", *map(str, range(30)), "slow", "end"]
    async with serving(Echo()) as fake, Client(fake.target) as client:
        assert [result.text async for result in client.map(iter(prompts), concurrency=4)] == prompts
    assert isinstance(fake, Echo) and 1 < fake.most <= 4


async def test_results_come_as_they_end() -> None:
    prompts = ["slow", *map(str, range(6))]
    async with serving(Echo()) as fake, Client(fake.target) as client:
        found = [(index, result.text) async for index, result in client.map_unordered(prompts, concurrency=3)]
    assert sorted(found) == list(enumerate(prompts))
    assert found[0] != (0, "slow")


async def test_a_full_server_is_asked_until_it_has_room() -> None:
    prompts = [str(number) for number in range(40)]
    async with serving(Echo(room=2)) as fake, Client(fake.target) as client:
        assert [result.text async for result in client.map(prompts, concurrency=20)] == prompts
    assert isinstance(fake, Echo) and fake.refused > 0 and fake.most <= 2


async def test_a_refusal_without_our_reason_is_retried_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(many, "PERSISTENT", replace(many.PERSISTENT, patience_s=0.05))
    proxy = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many connections")
    async with serving(FakeServer([proxy])) as fake, Client(fake.target, retries=0) as client:
        with pytest.raises(errors.Overloaded, match="too many connections"):
            await asyncio.wait_for(anext(client.map(["x"])), 120)


async def test_a_prompt_above_the_servers_message_limit_is_raised_in_its_place() -> None:
    async with serving(Echo()) as fake, Client(fake.target) as client:
        with pytest.raises(errors.InvalidRequest, match="larger than max"):
            await asyncio.wait_for(anext(client.map(["x" * 5 * 2**20])), 120)


async def test_a_final_failure_is_raised_in_its_place() -> None:
    async with serving(Echo()) as fake, Client(fake.target) as client:
        results = client.map(["a", "bad", *["slow"] * 100], concurrency=4)
        assert (await anext(results)).text == "a"
        with pytest.raises(errors.InvalidRequest):
            await anext(results)
    assert isinstance(fake, Echo) and len(fake.requests) < 50


@pytest.mark.parametrize("each", [ordered, unordered])
async def test_prompts_are_read_only_as_there_is_room(each: Any) -> None:
    taken: list[int] = []

    def prompts() -> Iterator[int]:
        for number in itertools.count():
            taken.append(number)
            yield number

    async def answer(number: int) -> int:
        await asyncio.sleep(0)
        return number

    results: AsyncIterator[Any] = each(answer, prompts(), 5)
    for _ in range(10):
        await anext(results)
    await results.aclose()  # type: ignore[attr-defined]
    assert len(taken) <= 10 + 2 * 5 + 1


@pytest.mark.parametrize("name", ["map", "map_unordered"])
@pytest.mark.parametrize("kind", [Client, SyncClient])
def test_wrong_arguments_are_raised_when_map_is_called(kind: Any, name: str) -> None:
    call = getattr(kind("127.0.0.1:1"), name)
    with pytest.raises(ValueError, match="concurrency is 0"):
        call(["x"], concurrency=0)
    with pytest.raises(TypeError, match="iterable of prompts"):
        call("def ")


def test_map_for_threads() -> None:
    with serving_in_a_thread([message("a", finish=EOS)]) as fake, SyncClient(fake.target) as client:
        results = client.map(["x"] * 10, concurrency=2)
        assert next(results).text == "a"
        assert [result.text for result in results] == ["a"] * 9
        assert sorted(index for index, _ in client.map_unordered(["x"] * 5)) == list(range(5))
        abandoned = client.map(["x"] * 10)
        next(abandoned)
        del abandoned
        assert client.generate("x").text == "a"


async def test_the_first_of_two_answers_wins_and_the_other_is_cancelled_on_its_server() -> None:
    quick, slow = FakeServer([message("quick", finish=EOS)]), FakeServer([message("slow", finish=EOS)])
    async with serving(slow), serving(quick), Client(f"ipv4:{slow.target},{quick.target}") as client:
        while not (slow.requests and quick.requests):
            await client.generate("x")
        slow.script = (["hang"],)
        slow.ended.clear()
        for _ in range(2):
            assert (await client.generate("x", hedge_after=0.05, request_id="mine")).text == "quick"
        await asyncio.wait_for(slow.ended.wait(), 120)
    assert "mine-hedge" in {request.request_id for request in quick.requests}


async def test_a_quick_answer_is_requested_once() -> None:
    async with serving(FakeServer([message("a", finish=EOS)])) as fake, Client(fake.target) as client:
        assert (await client.generate("x", hedge_after=30)).text == "a"
    assert len(fake.requests) == 1


async def test_if_both_attempts_fail_the_failure_is_raised() -> None:
    bad = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "bad", [error_info("INVALID_REQUEST")])
    async with serving(FakeServer([bad])) as fake, Client(fake.target) as client:
        with pytest.raises(errors.InvalidRequest):
            await client.generate("x", hedge_after=30)
    assert len(fake.requests) == 1
