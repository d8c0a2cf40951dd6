"""Scores as messages, and answers of the largest size that admission allows, none of which fails by its size."""

from __future__ import annotations

import asyncio

import pytest

from photon_grpc.client import Client
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.generation import Start
from photon_grpc.core.logprobs import RECORD
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.logprob_bounds import BYTES_PER_ID
from photon_grpc.frontend.output.logprobs import NO_TOKEN_LOGPROBS, TokenLogprobs
from photon_grpc.frontend.output.update import OutputDelta, Result, Update
from photon_grpc.server.server import Server
from photon_grpc.server.wire import codec, logprobs
from photon_grpc.v1 import inference_pb2 as pb
from tests.frontend.fake_engine import FACTS, done, frontend, served


def records(*scored: tuple[int, float, int]) -> bytes:
    return b"".join(RECORD.pack(*each) for each in scored)


def spelled(token_id: int) -> bytes:
    return b"\xe3" if token_id == 2 else b"t%d" % token_id


#: Two positions with two ids each.
SCORED = TokenLogprobs(records((2, -0.5, 1), (3, -1.25, 2), (3, -2.0, 128), (2**31 - 1, -0.125, 1)), 2, spelled)
MESSAGES = [
    pb.TokenScore(
        token_id=2,
        logprob=-0.5,
        rank=1,
        token_bytes=b"\xe3",
        candidates=[pb.Candidate(token_id=3, logprob=-1.25, rank=2, token_bytes=b"t3")],
    ),
    pb.TokenScore(
        token_id=3,
        logprob=-2.0,
        rank=128,
        token_bytes=b"t3",
        candidates=[pb.Candidate(token_id=2**31 - 1, logprob=-0.125, rank=1, token_bytes=b"t2147483647")],
    ),
]


async def written(*deltas: TokenLogprobs, prompt: TokenLogprobs = NO_TOKEN_LOGPROBS) -> pb.GenerateResponse:
    """Return a whole response, and check that a stream's message equals it."""
    outputs = tuple([OutputDelta(at, scores=scores) for at, scores in enumerate(deltas)])
    result = Result(Start("r", "m", 1, 0.0), outputs, prompt_scores=prompt)
    response = codec.generate_response(result)
    await logprobs.add_to_response(response, result)
    update = Update(outputs, prompt_scores=prompt)
    message = codec.stream_message(update, 2, None)
    await logprobs.add_to_message(message, update)
    assert list(message.deltas) == list(response.outputs)
    assert message.HasField("start") == response.HasField("prompt") and message.start.prompt == response.prompt
    return response


@pytest.mark.parametrize("many", [0, 4096])
async def test_scores_are_one_message_a_token(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MANY", many)
    response = await written(NO_TOKEN_LOGPROBS, SCORED)
    assert list(response.outputs[1].scores) == MESSAGES and not response.outputs[0].scores
    assert not response.HasField("prompt")


async def test_the_first_id_of_a_prompt_has_no_logprob() -> None:
    response = await written(prompt=TokenLogprobs(SCORED.records, 2, spelled, (0,)))
    first, *others = response.prompt.scores
    assert first == pb.TokenScore(token_id=0, token_bytes=b"t0") and not first.HasField("logprob")
    assert others == MESSAGES


async def test_a_scored_id_takes_no_more_bytes_than_admission_assumes() -> None:
    longest = b"x" * 3000
    scored = TokenLogprobs(records(*[(2**31 - 1, -1e-30, 2**31 - 1)] * 42), 21, lambda token_id: longest)
    (output,) = (await written(scored)).outputs
    assert output.ByteSize() <= 42 * (BYTES_PER_ID + len(longest))


MAX_MESSAGE_BYTES = 40_000


@pytest.mark.parametrize("num_outputs", [1, 2])
async def test_the_largest_admitted_answer_fits_into_a_message(num_outputs: int) -> None:
    model = served(max_message_bytes=MAX_MESSAGE_BYTES)
    assert model.tokenizer is not None
    longest = max(range(model.vocab_size), key=lambda id: len(model.token_bytes(id)))
    record = RECORD.pack(longest, -1e-30, 2**31 - 1)
    options = {"logprobs": 20, "prompt_logprobs": 3, "token_ids": True, "num_outputs": num_outputs}
    with frontend(model) as (front, link):
        server = Server(front, config=ServerConfig(max_message_size=MAX_MESSAGE_BYTES))
        (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
        async with Client(address) as client:
            call = asyncio.create_task(client.generate([1, 2, 3], **options))
            await link.added(1)
            num_tokens = link.adds[0].request.stop.max_tokens
            assert 3 < num_tokens < FACTS.max_model_len // 2
            handles = range(1, num_outputs + 1)
            link.step(prompt_scores={1: record * 4 * 2})
            for _ in range(num_tokens):
                link.step(*[(handle, longest) for handle in handles], scores=dict.fromkeys(handles, record * 21))
            link.step(finished=tuple(done(handle, FinishReason.CONTEXT_LENGTH, num_tokens) for handle in handles))
            result = await call
            assert [len(output.scores) for output in result.outputs] == [num_tokens] * num_outputs
            assert len(result.prompt_scores) == 3 and result.finish.reason == "CONTEXT_LENGTH"
            with pytest.raises(InvalidRequest, match=r"^output.logprobs: .* \d+ bytes; a message has room for \d+"):
                await client.generate([1, 2, 3], max_tokens=num_tokens + 1, **options)
        await server.drain_and_stop(0)


def test_candidates_are_cached_once_per_id() -> None:
    for _ in range(3):
        scores = TokenLogprobs(records(*((at % 50, -0.5, 1 + at % 3) for at in range(100))), 2, spelled)
        assert logprobs.written(scores, b"\x0a")
    assert len(logprobs._candidates(spelled)) <= 53
    assert logprobs._candidates.cache_info().maxsize == 4
