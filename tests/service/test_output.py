"""The output through gRPC equals that of transformers, alone and among others that come, end or are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from photon_grpc import demo
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc
from tests.runner.models import greedy, model
from tests.runner.test_greedy import prompts
from tests.service.running import serving

NUM_TOKENS = 32
CODE = ("def fib(n):", "class Stack:\n    def push(self, item):", "import os\nimport sys\n\n\ndef main():", "x")

Stub = inference_pb2_grpc.InferenceServiceStub


def ask(ids: list[int], max_tokens: int = NUM_TOKENS, **sampling: float) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))
    request.sampling.MergeFrom(inference_pb2.SamplingParams(**(sampling or {"temperature": 0})))
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = True
    request.output.token_ids = True
    return request


async def stream(stub: Stub, request: inference_pb2.GenerateRequest) -> tuple[list[int], str]:
    """Return the ids and the text of its only output."""
    ids: list[int] = []
    text = ""
    async for message in stub.StreamGenerate(request):
        for delta in message.deltas:
            ids += delta.token_ids
            text += delta.text
    return ids, text


async def together(address: str, requests: list[inference_pb2.GenerateRequest]) -> list[list[int]]:
    async with grpc.aio.insecure_channel(address) as channel:
        return [ids for ids, _ in await asyncio.gather(*(stream(Stub(channel), request) for request in requests))]


async def under_load(address: str, requests: list[inference_pb2.GenerateRequest], vocab: int) -> list[list[int]]:
    """Run the same while 24 others of random lengths come, most of which are cut off somewhere."""
    draw = random.Random(5)

    async def noise(stub: Stub) -> None:
        await asyncio.sleep(draw.random() / 2)
        ids = [draw.randrange(vocab) for _ in range(draw.randrange(1, 200))]
        call = stub.StreamGenerate(ask(ids, draw.randrange(1, 120), temperature=1.0, seed=draw.randrange(2**60)))
        patience = draw.choice((0, 0, 1, 3, 20, 1000))
        with contextlib.suppress(asyncio.CancelledError):
            async for _ in call:
                patience -= 1
                if patience < 0:
                    call.cancel()

    async with grpc.aio.insecure_channel(address) as channel:
        others = [asyncio.ensure_future(noise(Stub(channel))) for _ in range(24)]
        outputs = [ids for ids, _ in await asyncio.gather(*(stream(Stub(channel), request) for request in requests))]
        await asyncio.gather(*others)
    return outputs


#: tests/runner/test_greedy.py compares every family without a service.
@pytest.mark.parametrize(
    ("family", "block_size"),
    [
        pytest.param("llama", 8, marks=pytest.mark.full),
        pytest.param("qwen2", 16, marks=pytest.mark.full),
        ("qwen3", 64),
    ],
)
def test_each_family_equals_transformers_alone_together_and_under_load(family: str, block_size: int) -> None:
    directory, reference = model(family)
    asked = prompts(block_size)
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in asked]
    requests = [ask(prompt) for prompt in asked]
    flags = ["--block-size", str(block_size), "--num-blocks", str(1600 // block_size), "--max-num-batched-tokens", "96"]
    with checked_service("--model", str(directory), *flags) as address:
        assert asyncio.run(together(address, requests)) == expected
        assert [asyncio.run(together(address, [request]))[0] for request in requests] == expected
        assert asyncio.run(under_load(address, requests, 320)) == expected
        sampled = [ask(prompt, temperature=0.8, top_p=0.9, seed=number) for number, prompt in enumerate(asked)]
        alone = [asyncio.run(together(address, [request]))[0] for request in sampled]
        assert asyncio.run(under_load(address, sampled, 320)) == alone


@contextlib.contextmanager
def checked_service(*flags: str) -> Iterator[str]:
    """Yield the address of a service, which complains of nothing to its end."""
    with serving(*flags) as service:
        yield service.wait_ready()[0]
        assert service.end() == 0
    # The engine checks its books whenever it comes to rest, and says so when they do not balance.
    assert not [line for line in service.lines if "lost" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def embedded() -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Texts, their ids, and what transformers continues with."""
    tokenizer = Tokenizer.from_file(str(Path(demo.TARGET) / "tokenizer.json"))
    reference = AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float32).eval()
    ids = [tokenizer.encode(text).ids for text in CODE]
    return list(CODE), ids, [greedy(reference, prompt, NUM_TOKENS) for prompt in ids]


def test_the_embedded_model_equals_transformers_in_ids_and_text(embedded) -> None:  # type: ignore[no-untyped-def]
    texts, asked, expected = embedded
    tokenizer = Tokenizer.from_file(str(Path(demo.TARGET) / "tokenizer.json"))

    async def both(address: str) -> list[tuple[list[int], str]]:
        requests = [ask([1]) for _ in texts]
        for request, text in zip(requests, texts, strict=True):
            request.text = text
        async with grpc.aio.insecure_channel(address) as channel:
            return await asyncio.gather(*(stream(Stub(channel), request) for request in requests))

    with checked_service() as address:
        for (ids, text), wanted, prompt in zip(asyncio.run(both(address)), expected, asked, strict=True):
            assert ids == wanted
            whole = tokenizer.decode([*prompt, *wanted])
            assert whole.endswith(text) and text == whole[len(tokenizer.decode(prompt)) :]


@pytest.mark.full
def test_the_embedded_model_equals_transformers_under_load(embedded) -> None:  # type: ignore[no-untyped-def]
    _, asked, expected = embedded
    with checked_service() as address:
        assert asyncio.run(under_load(address, [ask(prompt) for prompt in asked], 4000)) == expected
