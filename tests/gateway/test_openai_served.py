"""OpenAI's API with the embedded model: the same text through every server, and log-probabilities of transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types import Completion

from photon_grpc import demo
from photon_grpc.client import Client, SyncClient
from tests.gateway.served_model import Served, both_servers

CODE = "def fib(n):\n    return"
ACCENTS = "naïve café 🙂 = 'Ωmega'"
MESSAGES: Any = [{"role": "user", "content": "Write a function."}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 17}


@pytest.fixture(scope="module")
def servers() -> Iterator[Served]:
    with both_servers() as opened:
        yield opened


@pytest.fixture(scope="module")
def client(servers: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{servers.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def over_grpc(servers: Served, prompt: Any, **options: Any) -> str:
    async def ask() -> str:
        async with Client(servers.grpc) as calls:
            return (await calls.generate(prompt, **options)).text

    return asyncio.run(ask())


def test_a_server_on_the_front_end_of_a_program_describes_its_model(servers: Served) -> None:
    async def described() -> Any:
        async with Client(servers.grpc) as calls:
            return await calls.model()

    limits = asyncio.run(described()).limits
    assert limits["max_logprobs"] == 20 and limits["max_message_bytes"] >= 2**25


def tokenized(client: OpenAI, text: str) -> list[int]:
    return client.post("/../tokenize", body={"prompt": text}, cast_to=dict)["tokens"]  # type: ignore[no-any-return,type-var]


# --- the same text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_every_api_gives_the_same_text(servers: Served, client: OpenAI, sampling: dict[str, Any]) -> None:
    expected = servers.llm.generate(CODE, max_tokens=20, **sampling)[0].text
    assert expected and over_grpc(servers, CODE, max_tokens=20, **sampling) == expected
    ids = tokenized(client, CODE)
    for prompt in (CODE, ids):
        made = client.completions.create(model="", prompt=prompt, max_tokens=20, **sampling)
        stream = client.completions.create(model="", prompt=prompt, max_tokens=20, stream=True, **sampling)
        assert made.choices[0].text == "".join(chunk.choices[0].text for chunk in stream) == expected


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("schema", [None, SCHEMA], ids=["free", "json_schema"])
def test_every_api_gives_the_same_chat(
    servers: Served, client: OpenAI, sampling: dict[str, Any], schema: dict[str, Any] | None
) -> None:
    options: dict[str, Any] = {"json_schema": json.dumps(schema)} if schema else {}
    form: dict[str, Any] = {"response_format": FORM} if schema else {}
    expected = servers.llm.generate([MESSAGES], chat=True, max_tokens=20, **sampling, **options)[0].text
    assert expected and over_grpc(servers, MESSAGES, max_tokens=20, **sampling, **options) == expected
    create: Any = client.chat.completions.create
    made = create(model="", messages=MESSAGES, max_tokens=20, **sampling, **form)
    stream = create(model="", messages=MESSAGES, max_tokens=20, stream=True, **sampling, **form)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert made.choices[0].message.content == streamed == expected
    if schema:
        assert json.loads(expected)["n"] in (1, 2, 3)


def test_the_other_forms_of_an_output(client: OpenAI) -> None:
    forms: list[tuple[dict[str, Any], Any]] = [
        ({"guided_choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"guided_regex": "[ab]{3}"}, lambda text: set(text) <= {"a", "b"} and len(text) == 3),
        ({"structured_outputs": {"choice": ["x1", "x2"]}}, lambda text: text in ("x1", "x2")),
        ({"guided_json": SCHEMA}, lambda text: json.loads(text)["n"] in (1, 2, 3)),
        ({"guided_grammar": 'start: "a" | "b"'}, lambda text: text in ("a", "b")),
    ]
    for form, fits in forms:
        made = client.completions.create(model="", prompt=CODE, max_tokens=20, extra_body=form)
        assert fits(made.choices[0].text), (form, made.choices[0].text)


# --- drafts ----------------------------------------------------------------------------------------------------------


def test_usage_tells_how_many_drafts_were_right() -> None:
    options: Any = {"model": "", "max_tokens": 24, "temperature": 0.0}
    streamed: Any = {"stream": True, "stream_options": {"include_usage": True}}
    flags = {"speculative_model": "ngram", "speculation_control": "fixed", "num_blocks": 64, "max_num_seqs": 4}
    with both_servers(**flags) as opened, OpenAI(base_url=f"{opened.http}/v1", api_key="none", max_retries=0) as client:
        with SyncClient(opened.grpc) as calls:
            expected = calls.generate(CODE, max_tokens=24, temperature=0.0).usage
        made = client.completions.create(prompt=[CODE, CODE], **options)
        *_, last = client.completions.create(prompt=[CODE, CODE], **options, **streamed)
        talk = client.chat.completions.create(messages=MESSAGES, **options)
        *_, end_of_talk = client.chat.completions.create(messages=MESSAGES, **options, **streamed)
    assert 0 < expected.accepted_draft_tokens < expected.draft_tokens
    for usage in (made.usage, last.usage):
        assert usage is not None and usage.completion_tokens == 2 * expected.output_tokens
        told = usage.completion_tokens_details
        assert told is not None and told.accepted_prediction_tokens == 2 * expected.accepted_draft_tokens
        assert told.accepted_prediction_tokens + (told.rejected_prediction_tokens or 0) == 2 * expected.draft_tokens
    assert talk.usage is not None and talk.usage.completion_tokens_details is not None
    assert end_of_talk.usage == talk.usage


def test_a_body_limits_its_drafts() -> None:
    options: Any = {"model": "", "max_tokens": 24, "temperature": 0.0}
    flags = {"speculative_model": "ngram", "speculation_control": "fixed", "num_blocks": 64, "max_num_seqs": 4}
    found: dict[Any, tuple[str, int]] = {}
    with both_servers(**flags) as opened, OpenAI(base_url=f"{opened.http}/v1", api_key="none", max_retries=0) as client:
        for most in (None, "auto", 1, 0, "off"):
            made = client.completions.create(prompt=CODE, extra_body={"speculation": most}, **options)
            told = made.usage and made.usage.completion_tokens_details
            drafted = told and (told.accepted_prediction_tokens or 0) + (told.rejected_prediction_tokens or 0)
            found[most] = made.choices[0].text, drafted or 0
        for wrong in (8, -1, "on"):
            with pytest.raises(BadRequestError, match=r"from 0 to 7|between 0 and 7") as refused:
                client.chat.completions.create(messages=MESSAGES, extra_body={"speculation": wrong}, **options)
            assert refused.value.param == "speculation" and str(wrong) in refused.value.message
    assert len({text for text, _ in found.values()}) == 1
    assert found["off"][1] == found[0][1] == 0 < found[1][1] < found["auto"][1] == found[None][1]


# --- log-probabilities -----------------------------------------------------------------------------------------------


def joined(chunks: Any) -> dict[int, dict[str, Any]]:
    """Return the text and the log-probabilities of each choice of a stream."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            whole = found.setdefault(choice.index, {"text": ""})
            whole["text"] += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                whole.setdefault(name, []).extend(values)
    return found


def whole(made: Completion) -> dict[int, dict[str, Any]]:
    return {each.index: {"text": each.text, **each.logprobs.model_dump()} for each in made.choices if each.logprobs}


def assert_alike(told: dict[str, Any], expected: dict[str, Any]) -> None:
    """Numbers may differ in their last digits, since other rows were computed beside them."""
    for name in ("text", "tokens", "text_offset"):
        assert told[name] == expected[name]
    assert told["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
    for top, expected_top in zip(told["top_logprobs"], expected["top_logprobs"], strict=True):
        assert top == (expected_top and pytest.approx(expected_top, abs=1e-4))


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_a_stream_has_the_log_probabilities_of_the_whole(client: OpenAI, max_tokens: int) -> None:
    options: Any = {"model": "", "prompt": [CODE, ACCENTS], "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    options |= {"n": 2, "temperature": 0.0}
    made = client.completions.create(**options)
    streamed = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(streamed)
    told, expected = joined(chunks), whole(made)
    assert told.keys() == expected.keys() == set(range(4))
    for index, each in expected.items():
        assert_alike(told[index], each)
    assert made.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == made.usage.completion_tokens
    if not max_tokens:
        assert [each.text for each in made.choices] == [CODE, CODE, ACCENTS, ACCENTS]
        assert made.usage.completion_tokens == 0 and made.choices[0].finish_reason == "length"


def test_offsets_are_those_of_the_tokens_in_the_text(client: OpenAI) -> None:
    for prompt in (CODE, ACCENTS):
        made = client.completions.create(model="", prompt=prompt, echo=True, logprobs=1, max_tokens=4, temperature=0)
        (choice,) = made.choices
        assert choice.logprobs is not None and choice.text.startswith(prompt)
        offsets = choice.logprobs.text_offset or []
        tokens = choice.logprobs.tokens or []
        assert offsets == sorted(offsets) and offsets[0] == 0
        plain = [(token, at) for token, at in zip(tokens, offsets, strict=True) if "\ufffd" not in token]
        assert all(choice.text[at:].startswith(token) or token.startswith("<|") for token, at in plain)
        assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None


TEXTS = (CODE, "for i in range(10):\n    print(i)\n")


def read_by_a_harness(client: OpenAI, prompts: list[list[int]]) -> list[tuple[list[float], list[bool]]]:
    """Return the log-probabilities and the greediness of each prompt as lm-evaluation-harness reads them."""
    made = client.completions.create(
        model="", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1
    )
    found = []
    for choice in sorted(made.choices, key=lambda choice: choice.index):
        assert choice.logprobs is not None
        told = (choice.logprobs.token_logprobs or [])[1:-1]
        tops = (choice.logprobs.top_logprobs or [])[1:-1]
        found.append((told, [number == max(top.values()) for number, top in zip(told, tops, strict=True)]))
    return found


def test_an_evaluation_harness_reads_the_scores_of_the_library(servers: Served, client: OpenAI) -> None:
    prompts = [tokenized(client, text) for text in TEXTS]
    scored = servers.llm.generate(prompts, max_tokens=1, temperature=0.0, prompt_logprobs=1)
    for (told, greedy), each in zip(read_by_a_harness(client, prompts), scored, strict=True):
        assert told == pytest.approx([score.logprob for score in each.prompt_scores[1:]], abs=1e-4)
        assert greedy == [score.rank == 1 for score in each.prompt_scores[1:]]


@pytest.mark.full
def test_an_evaluation_harness_reads_the_log_probabilities_of_transformers(client: OpenAI) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float32)
    prompts = [tokenized(client, text) for text in TEXTS]
    for (told, greedy), prompt in zip(read_by_a_harness(client, prompts), prompts, strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
        assert told == pytest.approx([expected[i, token].item() for i, token in enumerate(prompt[1:])], abs=1e-4)
        assert greedy == [bool(expected[i].argmax() == token) for i, token in enumerate(prompt[1:])]


def test_log_probabilities_of_a_chat(servers: Served, client: OpenAI) -> None:
    options: Any = {"model": "", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    made = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    expected = servers.llm.generate([MESSAGES], chat=True, max_tokens=5, temperature=0.0, logprobs=3)[0].scores
    assert made.choices[0].logprobs is not None
    told = made.choices[0].logprobs.content or []
    assert [each.logprob for each in told] == pytest.approx([score.logprob for score in expected], abs=1e-5)
    assert [bytes(each.bytes or ()) for each in told] == [score.token_bytes for score in expected]
    assert [len(each.top_logprobs) for each in told] == [3] * len(expected)
    stream = client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
    streamed = [each for chunk in stream if (scores := chunk.choices[0].logprobs) for each in scores.content or ()]
    assert streamed == told
    bare = client.chat.completions.create(**options, logprobs=True).choices[0].logprobs
    assert bare is not None and all(each.top_logprobs == [] for each in bare.content or ())
