"""Requests of one stream against a running service. Each gets the same answer as alone."""

from __future__ import annotations

import asyncio
from typing import Any

from photon_grpc.cli.load.load import Session, Turn, Workload, run_load
from photon_grpc.client import Client, Generation

REQUESTS: list[tuple[Any, dict[str, Any]]] = [
    ("def fib(n):", {"temperature": 0}),
    ("def fib(n):", {"temperature": 0, "token_ids": True, "logprobs": 3, "prompt_logprobs": 1}),
    ("class Stack:", {"temperature": 1.2, "seed": 3, "num_outputs": 3}),
    ("import ", {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 20, "prompt_token_ids": True}),
    ([10, 20, 30], {"temperature": 0, "text": False, "token_ids": True, "score_token_ids": [1, 2]}),
    ("def main():", {"temperature": 0, "stop_strings": ["\n"], "include_stop_in_text": True}),
    ("x = ", {"temperature": 1, "seed": 5, "choices": ["one", "two", "three"]}),
    ("x = ", {"temperature": 1, "seed": 6, "regex": "[0-9]{3}", "continuous_usage": True}),
    ("for i in ", {"temperature": 1, "seed": 7, "repetition_penalty": 1.3, "logit_bias": {5: -100.0}}),
    ([{"role": "user", "content": "Add two numbers."}], {"temperature": 0}),
    ("while ", {"temperature": 0, "continue_from": [10, 20], "priority": 2, "bypass_prefix_cache": True}),
    ("y", {"temperature": 1, "seed": 8, "min_tokens": 5, "ignore_eos": True, "min_interval": 0.01}),
]


async def test_mixed_requests_get_what_each_gets_alone(target: str) -> None:
    async with Client(target) as client:
        requests = [(prompt, {"max_tokens": 12, "seed": 1} | options) for prompt, options in REQUESTS]
        alone = [await client.generate(prompt, **options) for prompt, options in requests]
        async with client.multiplex() as many:
            shared = await asyncio.gather(*[many.generate(prompt, **options) for prompt, options in requests * 2])
    assert [parts(result) for result in shared] == [parts(result) for result in alone] * 2


def parts(result: Generation) -> tuple[Any, ...]:
    usage = result.usage
    scores = [[(s.token_id, s.rank, len(s.candidates)) for s in o.scores] for o in result.outputs]
    told = [(o.index, o.text, o.token_ids, o.finish, o.content) for o in result.outputs]
    prompt = (result.prompt_token_ids, [(s.token_id, s.rank) for s in result.prompt_scores])
    return told, scores, prompt, result.seed, result.model, usage.prompt_tokens, usage.output_tokens


async def test_an_id_in_flight_elsewhere_is_refused_on_this_stream_alone(target: str) -> None:
    async with Client(target) as client, client.multiplex() as here, client.multiplex() as there:
        first = here.stream("def fib(n):", request_id="same", max_tokens=2000, ignore_eos=True)
        await anext(first)
        second, third = await asyncio.gather(
            there.generate("x", request_id="same"), there.generate("x", max_tokens=2), return_exceptions=True
        )
        assert type(second).__name__ == "DuplicateRequestId" and isinstance(third, Generation)
        await anext(first)


async def test_a_load_of_one_stream_a_process(target: str) -> None:
    sessions = [Session([Turn([number + 5], 6)]) for number in range(12)]
    answers = await run_load(Workload(target, sessions, concurrency=6, multiplex=True, timeout_s=60), 2)
    assert [answer.reason for answer in answers] == [""] * 12
    assert {answer.output_tokens for answer in answers} == {6}
    assert all(answer.first_s is not None and answer.total_s >= answer.first_s for answer in answers)
