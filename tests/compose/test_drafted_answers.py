"""Over gRPC, with every option and many at once: answers of a server that drafts are those of one that does not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from photon_grpc import LLM, demo
from photon_grpc.client import Client, Generation, SyncClient
from photon_grpc.errors import InvalidRequest, RequestError
from tests.compose.matrix import ALONE, FEATURES, PROMPT, model
from tests.compose.over_grpc import over_grpc
from tests.examples import examples
from tests.properties.drawn_requests import DrawnRequest, scored
from tests.runner.drafters import first_layer_dir

#: Options of LLM alone, whose chats are a text, and what the client has for them.
OF_CHAT: Mapping[str, Mapping[str, Any]] = {
    "chat": {},
    "reasoning": {"template_args_json": '{"thinks": true}'},
    "called": {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
}
#: A text that repeats itself, so that prompt lookup drafts rightly, too.
TEXT = PROMPT + "a = 1\n    b = 1\n    a = 1\n    b = "
#: The server that drafts -> its flags, those that both servers have, and what drafts.
SERVERS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "paged": ({"speculative_model": "ngram", "num_blocks": 24, "max_num_batched_tokens": 24}, {}),
    "contiguous": ({"speculative_model": "first layer", "kv_layout": "contiguous", "enable_prefix_caching": False}, {}),
    "static": ({"speculative_model": "first layer", "scheduling_policy": "static", "async_depth": 1}, {}),
    "quantized": ({"speculative_model": "first layer", "num_blocks": 40}, {"quantization": "int8"}),
}


@contextmanager
def served(path: str, **flags: Any) -> Iterator[str]:
    """Yield the address of a server of the model; "first layer" stands for the directory of such a draft model."""
    if flags.get("speculative_model") == "first layer":
        flags["speculative_model"] = first_layer_dir()
    sizes = {"max_num_seqs": 8, "num_blocks": 200, "block_size": 8, "max_model_len": 256} | flags
    with LLM(path, device="cpu", dtype="float32", **sizes) as llm, over_grpc(llm) as address:
        yield address


def asked(names: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Return a prompt and options of the client."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "token_ids": True, "ignore_eos": False}
    for name in names:
        options |= OF_CHAT.get(name, FEATURES[name])
    if OF_CHAT.keys() & set(names):
        return [{"role": "user", "content": TEXT}], options
    return TEXT, options


def wanted() -> list[tuple[str, ...]]:
    """Return every option, and some pairs and triples of those that go together."""
    drawn = random.Random(1)
    pairs = drawn.sample(list(combinations(FEATURES, 2)), examples(48))
    triples = drawn.sample(list(combinations(FEATURES, 3)), examples(48))
    fit = [each for each in (*pairs, *triples) if len(ALONE & set(each)) < 2]
    return [*((name,) for name in FEATURES), *fit]


def shown(one: tuple[str, ...], found: Generation) -> Any:
    """Return what a caller sees; log-probabilities to the last places."""
    _, options = asked(one)
    request = DrawnRequest("", options)
    return [
        (
            each.token_ids,
            each.text,
            each.finish,
            scored(request, each.scores),
            (each.reasoning, each.content, each.tool_calls),
            each.message,
        )
        for each in found.outputs
    ], scored(request, found.prompt_scores, is_prompt=True)


def client_of(address: str) -> Client:
    client = Client(address)
    # It need not ask for the server's features: an LLM's limits are beyond what GetModel can tell.
    client._newer_fields.is_refusing = True
    return client


async def one_by_one(address: str, many: list[tuple[str, ...]]) -> list[Generation]:
    async with client_of(address) as client:
        return [await client.generate(prompt, **options) for prompt, options in map(asked, many)]


async def at_once(address: str, many: list[tuple[str, ...]]) -> list[Generation]:
    """Send all on one stream."""
    async with client_of(address) as client, client.multiplex() as multiplex:
        calls = (multiplex.generate(prompt, **options) for prompt, options in map(asked, many))
        return list(await asyncio.gather(*calls))


@cache
def without_drafts(path: str, **flags: str) -> list[Generation]:
    """Return the answers to all that is wanted, one after the other."""
    with served(path, **flags) as plain:
        return asyncio.run(one_by_one(plain, wanted()))


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with model() as directory:
        yield directory


@pytest.mark.parametrize(
    # tests/compose/test_sparse_matrix.py has every option with prompt lookup.
    "name",
    [pytest.param(name, marks=[] if name == "quantized" else pytest.mark.full) for name in SERVERS],
)
def test_every_option_answers_as_without_drafts(name: str, path: str) -> None:
    many, (flags, shared) = wanted(), SERVERS[name]
    expected = without_drafts(path, **shared)
    with served(path, speculation_control="fixed", **flags, **shared) as drafting:
        found = asyncio.run(at_once(drafting, many))
    for one, own, other in zip(many, found, expected, strict=True):
        assert shown(one, own) == shown(one, other), one
    drafts = sum(each.usage.draft_tokens for each in found)
    assert 0 < sum(each.usage.accepted_draft_tokens for each in found) <= drafts
    assert not any(each.usage.draft_tokens for each in expected)


def test_a_head_answers_as_without_drafts() -> None:
    many = [("logprobs", "outputs"), ("drawn", "schema"), ("repetition",), ("top_p", "stop_string")]
    with served(str(demo.TARGET)) as plain:
        expected = asyncio.run(one_by_one(plain, many))
    with served(str(demo.TARGET), speculative_model=str(demo.EAGLE3), speculation_control="fixed") as drafting:
        found = asyncio.run(at_once(drafting, many))
    assert [shown(*each) for each in zip(many, found, strict=True)] == [
        shown(*each) for each in zip(many, expected, strict=True)
    ]
    assert all(each.usage.draft_tokens for each in found)


def test_a_call_says_how_many_tokens_are_drafted(path: str) -> None:
    options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    with served(path) as plain, SyncClient(plain) as client:
        expected = client.generate(TEXT, **options)
        # A server that does not draft takes the field, and nothing follows from it.
        assert client.generate(TEXT, speculation=3, **options).usage.draft_tokens == 0
    with served(path, speculative_model="ngram", speculation_control="fixed") as address, SyncClient(address) as client:
        found = {most: client.generate(TEXT, speculation=most, **options) for most in (0, 1, 7, None)}
        refused: list[RequestError] = []
        for wrong in (8, -1, 2**31):
            with pytest.raises(InvalidRequest) as raised:
                client.generate(TEXT, speculation=wrong, **options)
            refused.append(raised.value)
        # The next call is none the worse for it.
        assert client.generate(TEXT, **options).text == expected.text
    assert {each.text for each in found.values()} == {expected.text}
    drafts = {most: each.usage.draft_tokens for most, each in found.items()}
    assert drafts[0] == 0 < drafts[1] < 24 and drafts[7] == drafts[None] > drafts[1]
    assert all(str(each.field).endswith("speculation") for each in refused)
    assert "7" in str(refused[0]) and "8" in str(refused[0])
