"""Every option beside every other: each pair, and triples drawn once, in one crowded batch with plain requests. Each
answer is that of the request alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import pytest

from photon_grpc import LLM, demo
from photon_grpc.errors import RequestError
from tests.properties.drawn_requests import DrawnRequest, Output, complete, together

PROMPT = "def fib(n):\n    "
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
FEATURES: dict[str, Mapping[str, Any]] = {
    "drawn": {"temperature": 1.2, "seed": 5},
    "top_p": {"temperature": 0.9, "seed": 6, "top_p": 0.8},
    "top_k": {"temperature": 1.1, "seed": 7, "top_k": 12, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.9, "presence_penalty": 0.4},
    "bias": {"logit_bias": {10: 4.0, 206: -100.0, 15: 2.0}},
    "allowed": {"allowed_token_ids": list(range(0, 2048, 2))},
    "min_tokens": {"min_tokens": 3},
    "stop_string": {"stop_strings": ("n", "=")},
    "stop_id": {"stop_token_ids": [206, 284, 95, 10]},
    "outputs": {"num_outputs": 2},
    "logprobs": {"logprobs": 5},
    "given": {"score_token_ids": [3, 95, 1000]},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "continued": {"continue_from": [72, 73]},  # "ab": bytes have these ids in every such tokenizer
    "session": {"session_id": "s"},
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": "[a-z]{2,9}( [a-z]+)*"},
}
PLAIN = [
    DrawnRequest(PROMPT, {"temperature": 0.0, "max_tokens": 4}),
    DrawnRequest("import os\n", {"max_tokens": 4, "seed": 9}),
]


def request(names: tuple[str, ...]) -> DrawnRequest:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": False}
    for name in names:
        options |= FEATURES[name]
    return DrawnRequest(PROMPT, options)


def answer(llm: LLM, one: DrawnRequest) -> list[Output] | str:
    """The outputs, or why there are none."""
    try:
        return complete(llm, one)
    except RequestError as error:
        return error.reason


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(str(demo.DRAFT), device="cpu", max_num_seqs=2, num_blocks=64, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def crowded() -> Iterator[LLM]:
    """Few blocks and small steps: sequences are preempted, prompts come in chunks; each step is launched before the one
    before it is read."""
    with LLM(
        str(demo.DRAFT),
        device="cpu",
        async_depth=1,
        max_num_seqs=8,
        num_blocks=24,
        block_size=4,
        max_num_batched_tokens=24,
    ) as llm:
        yield llm


def pairs_and_triples() -> list[tuple[str, ...]]:
    triples = list(combinations(FEATURES, 3))
    return [*((name,) for name in FEATURES), *combinations(FEATURES, 2), *random.Random(0).sample(triples, 200)]


@pytest.mark.timeout(400)
def test_every_pair_and_many_triples_answer_as_alone(alone: LLM, crowded: LLM) -> None:
    names = pairs_and_triples()
    expected = {each: answer(alone, request(each)) for each in names}
    refused = [each for each in names if isinstance(expected[each], str)]
    assert all(len(set(each) & {"continued", "outputs", "schema", "regex", "allowed"}) >= 2 for each in refused), (
        refused
    )
    served = [each for each in names if each not in refused]
    plain = [complete(alone, one) for one in PLAIN]
    for first in range(0, len(served), 24):
        called = served[first : first + 24]
        *answers, one, other = together(crowded, [*map(request, called), *PLAIN])
        assert [one, other] == plain
        for each, outputs in zip(called, answers, strict=True):
            assert outputs == expected[each], each
    assert [answer(crowded, request(each)) for each in refused] == [expected[each] for each in refused]
