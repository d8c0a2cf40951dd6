"""A stream that is cut off continues at another server: its request there, and what its reader sees."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from photon_grpc import errors
from photon_grpc.client import Client, retry_policy
from photon_grpc.v1 import inference_pb2 as pb

from .fake_server import FakeServer, Refusal, error_info, message, serving

EOS = pb.FINISH_REASON_EOS


def with_ids(text: str, *ids: int, **more: Any) -> pb.StreamGenerateResponse:
    response = message(text, **more)
    response.deltas[0].token_ids.extend(ids)
    return response


def lost(reason: str = "ENGINE_FAILURE") -> Refusal:
    return Refusal(grpc.StatusCode.UNAVAILABLE, "gone", [error_info(reason)])


async def test_a_stream_resumes_from_its_ids_with_its_seed() -> None:
    first = [with_ids("ab", 1, 2, start=True), with_ids("c", 3), lost()]
    second = [with_ids("d", 4, start=True), lost("DRAINING")]
    third = [with_ids("e", 5, start=True, finish=EOS)]
    async with serving(FakeServer(first, second, third)) as fake, Client(fake.target) as client:
        stream = client.stream("x", temperature=1, prompt_token_ids=True, prompt_logprobs=1, max_duration=9)
        deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == "abcde"
    assert {delta.token_ids for delta in deltas} == {()}
    assert [list(request.continue_from.ids) for request in fake.requests] == [[], [1, 2, 3], [1, 2, 3, 4]]
    for request in fake.requests[1:]:
        assert (request.sampling.seed, request.request_id, request.sampling.temperature) == (7, "r-1", 1)
        assert not request.output.prompt_token_ids and not request.output.HasField("prompt_logprobs")
        assert 0 < request.stop.max_duration.ToMilliseconds() <= 9000
    assert all(request.output.token_ids for request in fake.requests)
    # The last call counted 5 in and 3 out; 4 of the 5 had been output.
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.output_tokens) == (1, 7)
    assert stream.timing is not None and stream.timing.total_s >= stream.timing.first_token_s > 0


async def test_a_status_that_is_lost_after_the_last_message_is_not_missed() -> None:
    script = [with_ids("a", 1, start=True), with_ids("b", 2, finish=EOS), lost()]
    async with serving(FakeServer(script)) as fake, Client(fake.target) as client:
        deltas = [delta async for delta in client.stream("x")]
    assert [(delta.text, delta.finish is not None) for delta in deltas] == [("a", False), ("b", True)]
    assert len(fake.requests) == 1


async def test_ids_are_returned_only_if_requested() -> None:
    script = [with_ids("ab", 1, 2, start=True), lost()], [with_ids("c", 3, start=True, finish=EOS)]
    async with serving(FakeServer(*script)) as fake, Client(fake.target) as client:
        received = [delta.token_ids async for delta in client.stream("x", token_ids=True, continue_from=[9])]
    assert received == [(1, 2), (3,)]
    assert list(fake.requests[1].continue_from.ids) == [9, 1, 2]


async def test_a_server_that_is_full_is_waited_for() -> None:
    full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [error_info("QUEUE_FULL")])
    script = [with_ids("a", 1, start=True), lost()], [full], [full], [with_ids("b", 2, start=True, finish=EOS)]
    async with serving(FakeServer(*script)) as fake, Client(fake.target, retries=0) as client:
        assert "".join([delta.text async for delta in client.stream("x")]) == "ab"
    assert len(fake.requests) == 4


async def test_several_outputs_cannot_be_resumed() -> None:
    script = [with_ids("a", 1, start=True), lost()]
    async with serving(FakeServer(script)) as fake, Client(fake.target) as client:
        stream = client.stream("x", num_outputs=2)
        await anext(stream)
        with pytest.raises(errors.EngineFailure, match="gone; a stream of 2 outputs cannot be resumed"):
            await anext(stream)
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (Refusal(grpc.StatusCode.INTERNAL, details=[error_info("NUMERIC_FAILURE")]), errors.NumericFailure),
        (Refusal(grpc.StatusCode.ABORTED, details=[error_info("ABORTED_BY_ADMIN")]), errors.AbortedByAdmin),
    ],
)
async def test_a_failure_that_would_repeat_is_raised(refusal: Refusal, expected: type[Exception]) -> None:
    async with serving(FakeServer([with_ids("a", 1, start=True), refusal])) as fake, Client(fake.target) as client:
        stream = client.stream("x")
        await anext(stream)
        with pytest.raises(expected):
            await anext(stream)
    assert len(fake.requests) == 1


async def test_the_deadline_holds_over_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [with_ids("a", 1, start=True), lost()], [lost("DRAINING")]
    async with serving(FakeServer(*script)) as fake, Client(fake.target, retries=0) as client:
        # Each call after the first costs 15 s, so the deadline comes before the patience of 60 s ends.
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 15 * max(0, len(fake.requests) - 1))
        monkeypatch.setattr(retry_policy, "time", clock)
        stream = client.stream("x", timeout=40)
        await anext(stream)
        with pytest.raises(errors.DeadlinePassed, match="40 s have passed; the stream was cut off"):
            await anext(stream)
    left_s = [request.scheduling.timeout.seconds for request in fake.requests]
    assert len(left_s) == 4 and 40 >= left_s[1] > 25 >= left_s[2] > 10 >= left_s[3] > 0


async def test_leaving_ends_the_wait_for_another_server() -> None:
    script = [with_ids("a", 1, start=True), lost()], [lost()]
    async with serving(FakeServer(*script)) as fake, Client(fake.target, retries=0) as client:
        stream = client.stream("x")
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        while len(fake.requests) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_call_has_the_deadline_of_its_client() -> None:
    async with serving(FakeServer(["hang"])) as fake, Client(fake.target, timeout=0.1) as client:
        with pytest.raises(errors.DeadlinePassed):
            await client.generate("x")
        with pytest.raises(errors.DeadlinePassed):
            await anext(client.stream("x"))
        async with client.multiplex() as many:
            with pytest.raises(errors.PhotonError):
                await many.generate("x")


async def test_a_connection_lost_between_headers_and_output_is_retried() -> None:
    """gRPC itself does not retry a call whose headers have arrived."""
    cut = ["headers", Refusal(grpc.StatusCode.UNAVAILABLE, "Socket closed")]
    async with serving(FakeServer(cut, [message("a", finish=EOS)])) as fake, Client(fake.target) as client:
        assert [delta.text async for delta in client.stream("x")] == ["a"]
    async with serving(FakeServer(cut)) as fake, Client(fake.target, retries=0) as client:
        with pytest.raises(errors.Unavailable):
            await anext(client.stream("x"))
    assert len(fake.requests) == 1


# --- heartbeats ------------------------------------------------------------------------------------------------------


def beat(sequence: int = 1) -> pb.StreamGenerateResponse:
    return pb.StreamGenerateResponse(sequence=sequence)


ANSWER = [with_ids("a", 1, start=True, finish=EOS)]
TEMPORARY = [lost("ENGINE_RESTARTING"), lost("DRAINING"), Refusal(grpc.StatusCode.UNAVAILABLE, "a proxy's")]


@pytest.mark.parametrize("failure", TEMPORARY)
async def test_a_call_that_fails_after_heartbeats_is_made_again(failure: Refusal) -> None:
    """gRPC does not retry it, since it has received something."""
    script = [beat(1), beat(2), failure], [beat(1), failure], [beat(1), *ANSWER]
    async with serving(FakeServer(*script)) as fake, Client(fake.target) as client:
        stream = client.stream("x", heartbeat_interval=1, seed=3)
        deltas = [delta async for delta in stream]
    assert [(delta.text, delta.finish is not None) for delta in deltas] == [("a", True)]
    assert len(fake.requests) == 3 and stream.start is not None
    for request in fake.requests:
        assert request.stream.heartbeat_interval.seconds == 1
        assert request.sampling.seed == 3 and not request.continue_from.ids


@pytest.mark.parametrize("pushback", ["-1", "never"])
async def test_a_failure_after_heartbeats_is_final_if_the_server_says_so(pushback: str) -> None:
    trailers = (("grpc-retry-pushback-ms", pushback),)
    final = Refusal(grpc.StatusCode.UNAVAILABLE, "no", [error_info("ENGINE_RESTARTING")], trailers)
    async with serving(FakeServer([beat(), final])) as fake, Client(fake.target) as client:
        with pytest.raises(errors.EngineRestarting) as raised:
            await anext(client.stream("x", heartbeat_interval=1))
    assert len(fake.requests) == 1 and raised.value.is_final


async def test_heartbeats_do_not_count_as_progress() -> None:
    """Else a server that fails after each would be called until the deadline."""
    async with serving(FakeServer([beat(), lost("DRAINING")])) as fake, Client(fake.target, retries=2) as client:
        with pytest.raises(errors.Draining):
            await anext(client.stream("x", heartbeat_interval=1))
    assert len(fake.requests) == 3


@pytest.mark.parametrize(
    ("options", "failure", "expected"),
    [
        ({"resume": False}, lost("DRAINING"), errors.Draining),
        ({}, Refusal(grpc.StatusCode.INTERNAL, details=[error_info("NUMERIC_FAILURE")]), errors.NumericFailure),
        ({}, Refusal(grpc.StatusCode.INVALID_ARGUMENT, details=[error_info("PROMPT_TOO_LONG")]), errors.PromptTooLong),
    ],
)
async def test_what_is_not_retried_after_heartbeats(options: Any, failure: Refusal, expected: type[Exception]) -> None:
    async with serving(FakeServer([beat(), failure])) as fake, Client(fake.target, **options) as client:
        with pytest.raises(expected):
            await anext(client.stream("x", heartbeat_interval=1))
    assert len(fake.requests) == 1


async def test_a_stream_goes_on_through_heartbeats_of_the_next_server() -> None:
    script = (
        [with_ids("a", 1, start=True), lost()],
        [beat(), lost()],
        [beat(), with_ids("b", 2, start=True, finish=EOS)],
    )
    async with serving(FakeServer(*script)) as fake, Client(fake.target) as client:
        stream = client.stream("x", heartbeat_interval=1)
        deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == "ab"
    assert [list(request.continue_from.ids) for request in fake.requests] == [[], [1], [1]]


async def test_the_usage_of_an_output_is_that_of_all_calls() -> None:
    last = with_ids("c", 3, start=True, finish=EOS)
    last.deltas[0].usage.output_tokens = 1
    script = [with_ids("ab", 1, 2, start=True), lost()], [last]
    async with serving(FakeServer(*script)) as fake, Client(fake.target) as client:
        deltas = [delta async for delta in client.stream("x")]
    assert deltas[-1].usage is not None and deltas[-1].usage.output_tokens == 3
    assert deltas[0].usage is None
