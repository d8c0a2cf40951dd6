"""Answers as large as the door lets through, over the wire: none dies of its own size."""

from __future__ import annotations

import asyncio

import pytest

from photon_grpc.client import Client
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.request import FinishReason
from photon_grpc.core.scores import RECORD
from photon_grpc.errors import InvalidRequest
from photon_grpc.server.server import Server
from tests.frontend.fake_engine import FACTS, done, frontend, served

MAX_MESSAGE_BYTES = 40_000


@pytest.mark.parametrize("num_outputs", [1, 2])
async def test_the_largest_answer_that_is_let_through_arrives(num_outputs: int) -> None:
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
            with pytest.raises(InvalidRequest, match=r"^output.logprobs: .* may take \d+ bytes; \d+ are left"):
                await client.generate([1, 2, 3], max_tokens=num_tokens + 1, **options)
        await server.drain_and_stop(0)
