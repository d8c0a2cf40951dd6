"""Many requests over one stream: the client against a server with a real front end and a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from photon_grpc.access.places import Places
from photon_grpc.cli.load.load import Turn, Workload
from photon_grpc.cli.load.load_client import GrpcCalls
from photon_grpc.client import Client, Multiplex, Unreachable
from photon_grpc.client.channel import open_channel
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.frames import Failed
from photon_grpc.errors import (
    Cancelled,
    Draining,
    DuplicateRequestId,
    IdleStreamEvicted,
    InvalidRequest,
    KVCapacity,
    PhotonError,
)
from photon_grpc.server.server import Server
from photon_grpc.v1 import inference_pb2 as pb
from tests.frontend.fake_engine import FakeLink, done, frontend
from tests.server.fake_frontend import serving, until

from .fake_server import FakeServer, message
from .fake_server import serving as serving_fake

TOKEN = 70


@pytest.fixture
async def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
async def many(link: FakeLink) -> AsyncIterator[Multiplex]:
    with frontend(link=link) as (front, _):
        async with serving(front) as address, Client(address) as client, client.multiplex() as multiplex:  # type: ignore[arg-type]
            yield multiplex


async def test_streams_and_whole_results_share_a_stream(many: Multiplex, link: FakeLink) -> None:
    whole = asyncio.create_task(many.generate("hi", num_outputs=2, token_ids=True, request_id="whole"))
    await link.added(1)
    stream = many.stream("hi")
    reading = asyncio.create_task(anext(stream))
    await link.added(2)
    link.step((1, TOKEN), (2, TOKEN + 1), (3, TOKEN))
    first = await reading
    assert stream.start is not None and stream.usage is None
    link.step((1, TOKEN), (3, TOKEN), finished=(done(1), done(2), done(3)))
    rest = [delta async for delta in stream]
    result = await whole
    assert (result.request_id, result.outputs[0].token_ids, result.outputs[1].token_ids) == (
        "whole",
        (TOKEN, TOKEN),
        (TOKEN + 1,),
    )
    assert first.text + "".join(delta.text for delta in rest) == result.text == first.text * 2
    assert result.usage.output_tokens == 3 and result.finish.reason == "MAX_TOKENS"
    assert stream.usage is not None and stream.usage.output_tokens == 2


async def test_leaving_a_stream_cancels_its_request_alone(many: Multiplex, link: FakeLink) -> None:
    other = asyncio.create_task(many.generate("hi"))
    await link.added(1)
    stream = many.stream("hi")
    asking = asyncio.ensure_future(anext(stream))
    await link.added(2)
    link.step((2, TOKEN))
    await asking
    del stream, asking
    await until(lambda: link.aborted == [2])
    link.step((1, TOKEN), finished=(done(1),))
    assert (await other).usage.output_tokens == 1


async def test_a_cancelled_task_ends_its_request(many: Multiplex, link: FakeLink) -> None:
    task = asyncio.create_task(many.generate("hi"))
    await link.added(1)
    task.cancel()
    await until(lambda: link.aborted == [1])
    stream = many.stream("hi")
    await link.added(2)
    stream.cancel()
    with pytest.raises(Cancelled):
        await anext(stream)


async def test_failures_are_exceptions_of_their_request(many: Multiplex, link: FakeLink) -> None:
    stream = many.stream("hi", request_id="mine")
    await link.added(1)
    with pytest.raises(DuplicateRequestId):
        many.stream("hi", request_id="mine")
    with pytest.raises(InvalidRequest) as refused:
        await many.generate("", max_tokens=1)
    assert refused.value.field == "text"
    with pytest.raises(InvalidRequest) as refused:
        await many.generate("hi", request_id="i" * 129)
    assert refused.value.field == "request_id"
    link.step(failed=(Failed.of(1, KVCapacity("too many blocks", needed=9, limit=6)),))
    with pytest.raises(KVCapacity) as failed:
        await anext(stream)
    assert (failed.value.needed, failed.value.limit) == (9, 6)
    assert many.stream("hi", request_id="mine") is not None


async def test_the_end_of_the_stream_reaches_every_request() -> None:
    link = FakeLink()
    with frontend(link=link) as (front, _):
        async with serving(front) as address, Client(address, retries=0) as client, client.multiplex() as many:  # type: ignore[arg-type]
            tasks = [asyncio.create_task(many.generate("hi")) for _ in range(3)]
            await link.added(3)
            await front.drain(0.05)
            for task in tasks:
                with pytest.raises(Draining):
                    await task
        with pytest.raises((Unreachable, Draining)):
            await many.generate("hi")


async def test_new_requests_leave_a_server_that_drains_while_the_old_one_ends() -> None:
    links = FakeLink(), FakeLink()
    with frontend(link=links[0]) as (one, _), frontend(link=links[1]) as (other, _):
        async with (
            serving(one) as first,  # type: ignore[arg-type]
            serving(other) as second,  # type: ignore[arg-type]
            Client(f"ipv4:{first},{second}") as client,
            client.multiplex() as many,
        ):
            old = asyncio.create_task(many.generate("hi"))
            await until(lambda: any(link.adds for link in links))
            here, there = links if links[0].adds else reversed(links)
            draining = asyncio.create_task((one if here is links[0] else other).drain(60))
            new = asyncio.create_task(many.generate("hi"))
            await there.added(1)
            there.step((1, TOKEN), finished=(done(1),))
            assert (await new).usage.output_tokens == 1
            here.step((1, TOKEN), (1, TOKEN), finished=(done(1),))
            assert (await old).usage.output_tokens == 2
            await draining


async def test_a_missing_server_fails_every_request() -> None:
    async with Client("127.0.0.1:1", retries=0) as client, client.multiplex() as many:
        answers = await asyncio.gather(*[many.generate("hi") for _ in range(3)], return_exceptions=True)
    assert all(isinstance(answer, Unreachable) for answer in answers), answers
    assert isinstance(answers[0], PhotonError)


class NewerServer(FakeServer):
    """A servicer that sends an item of an unknown kind before the first message."""

    async def MultiplexGenerate(self, actions: Any, context: Any) -> AsyncIterator[pb.MultiplexGenerateResponse]:
        async for action in actions:
            response = message("ok", start=True, finish=pb.FINISH_REASON_EOS)
            items = [pb.MultiplexItem(handle=1, request_id=action.generate.request_id)]
            items.append(pb.MultiplexItem(handle=1, response=response))
            yield pb.MultiplexGenerateResponse(items=items)


async def test_an_item_of_a_newer_server_is_passed_over() -> None:
    async with serving_fake(NewerServer()) as fake, Client(fake.target) as client, client.multiplex() as many:
        assert (await many.generate("x")).seed == 7
        stream = many.stream("x")
        assert [delta.text async for delta in stream] == ["ok"]
        assert stream.start is not None and stream.start.seed == 7


@asynccontextmanager
async def evicting(link: FakeLink, **options: object) -> AsyncIterator[tuple[Multiplex, Places]]:
    """Yield requests that share a stream, and the places of its server."""
    with frontend(link=link) as (front, _):
        server = Server(front, config=ServerConfig())
        (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
        async with Client(address, **options) as client, client.multiplex() as many:  # type: ignore[arg-type]
            yield many, server._inference.places
        await server.drain_and_stop(0)


async def answered(many: Multiplex, link: FakeLink, number: int) -> None:
    asking = asyncio.create_task(many.generate("hi"))
    await link.added(number)
    link.step((number, TOKEN), finished=(done(number),))
    assert (await asking).usage.output_tokens == 1


@pytest.mark.parametrize("retries", [0, 4])
async def test_a_stream_whose_place_was_needed_is_opened_again_with_the_next_request(retries: int) -> None:
    link = FakeLink()
    async with evicting(link, retries=retries) as (many, places):
        await answered(many, link, 1)
        assert places.shed()
        await asyncio.sleep(0.1)
        assert places.size == 0  # the stream opens with the first request
        await answered(many, link, 2)
        assert places.size == 1


@pytest.mark.parametrize("resume", [False, True])
async def test_a_request_on_its_way_to_a_stream_that_ends_as_idle_is_sent_again(resume: bool) -> None:
    link = FakeLink()
    async with evicting(link, retries=0, resume=resume) as (many, places):
        await answered(many, link, 1)
        for number in (2, 3):
            assert places.shed()
            # The client does not know yet.
            await answered(many, link, number)
        assert places.shed()
        cancelled = many.stream("hi")
        cancelled.cancel()
        with pytest.raises((Cancelled, asyncio.CancelledError)):
            await anext(cancelled)
        assert len(link.adds) == 3


async def test_a_request_of_a_load_on_its_way_to_a_stream_that_ends_as_idle_is_sent_again_too() -> None:
    link = FakeLink()
    async with evicting(link) as (many, places), open_channel(many._target, credentials=None, retries=0) as channel:
        calls = GrpcCalls(Workload(many._target, [], multiplex=True), channel)
        assert calls.multiplex is not None
        async with calls.multiplex:
            for number in (1, 2):
                asking = asyncio.create_task(calls.ask(Turn("hi", 1), None))
                await link.added(number)
                link.step((number, TOKEN), finished=(done(number),))
                result = await asking
                assert (result.reason, result.output_tokens) == ("", 1)
                assert places.shed()


async def test_a_server_that_takes_every_place_away_is_full() -> None:
    link = FakeLink()
    async with evicting(link, retries=0, resume=False) as (many, places):

        async def take_away() -> None:
            while True:
                places.shed(busy=True)
                await asyncio.sleep(0)

        taking = asyncio.create_task(take_away())
        with pytest.raises(IdleStreamEvicted):
            await many.generate("hi")
        taking.cancel()


async def test_a_stream_that_ran_when_memory_was_needed_goes_on_elsewhere() -> None:
    link = FakeLink()
    async with evicting(link) as (many, places):
        stream = many.stream("hi")
        reading = asyncio.ensure_future(anext(stream))
        await link.added(1)
        link.step((1, TOKEN))
        first = await reading
        assert not places.shed() and places.shed(busy=True)
        rest = asyncio.ensure_future(anext(stream))
        await link.added(2)
        link.step((2, TOKEN), finished=(done(2),))
        assert (await rest).text == first.text
        assert link.adds[1].request.prompt_ids != link.adds[0].request.prompt_ids or link.aborted == [1]


async def test_a_health_watch_whose_place_was_needed_fails_no_request() -> None:
    """gRPC reopens it at once, and calls wait for its answer."""
    link = FakeLink()
    with frontend(link=link) as (front, _):
        server = Server(front, config=ServerConfig())
        (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
        async with Client(address, retries=0) as client:
            for number in range(1, 6):
                asking = asyncio.create_task(client.generate("hi"))
                await link.added(number)
                link.step((number, TOKEN), finished=(done(number),))
                assert (await asking).usage.output_tokens == 1
                await until(lambda: server._health.places.size == 1)
                assert server._health.places.shed()
        await server.drain_and_stop(0)
