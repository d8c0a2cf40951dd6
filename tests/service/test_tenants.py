"""Over gRPC, as in one program: few slots, all options drawn, and every output that of the request alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from photon_grpc import LLM
from photon_grpc.client import Client
from tests.examples import examples
from tests.properties.drawn_requests import DrawnRequest, Output, complete, drawn_requests, scored, unshrunk
from tests.service.running import serving


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    flags = ["--max-num-seqs", "3", "--max-num-batched-tokens", "24", "--block-size", "4", "--num-blocks", "48"]
    with serving(*flags) as service:
        yield service.wait_ready()[0]
        assert service.end() == 0


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(device="cpu", max_num_seqs=3, num_blocks=64, enable_prefix_caching=False) as llm:
        yield llm


async def together(address: str, many: list[DrawnRequest]) -> list[list[Output]]:
    async with Client(address) as client:

        async def one(drawn: DrawnRequest) -> list[Output]:
            options = {name.removesuffix("_s"): value for name, value in drawn.options.items()}
            generation = await client.generate(drawn.prompt, token_ids=True, **options)
            prompt_scores = scored(drawn, generation.prompt_scores, is_prompt=True)
            return [
                Output(each.token_ids, each.text, each.finish.reason, scored(drawn, each.scores), prompt_scores)
                for each in generation.outputs
            ]

        return await asyncio.gather(*map(one, many))


@given(drawn_requests)
@settings(unshrunk, max_examples=examples(12), derandomize=True)
def test_what_a_server_says_is_what_the_request_gets_alone(address: str, alone: LLM, many: list[DrawnRequest]) -> None:
    assert asyncio.run(together(address, many)) == [complete(alone, one) for one in many]
