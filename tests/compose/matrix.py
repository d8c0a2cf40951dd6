"""Every option beside every other: triples that have each pair, in one crowded batch with plain requests."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from photon_grpc import LLM, demo
from photon_grpc.errors import RequestError
from photon_grpc.v1.inference_pb2 import Usage
from tests.examples import examples
from tests.properties.drawn_requests import DrawnRequest, Output, complete, together

PROMPT = "def fib(n):\n    "
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
TOOLS = '[{"type": "function", "function": {"name": "f"}}]'
#: The message, the mark of reasoning where it is wanted, and for the reader of templates those of calls.
TEMPLATE = (
    "{{ messages[0].content }}{% if thinks %}<think>{% endif %}"
    '{# </think> <tool_call> {"arguments": {}} </tool_call> #}'
)
EOS_ID = 1
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
    "ignore_eos": {"ignore_eos": True, "logit_bias": {EOS_ID: 20.0}},
    "shown_stop": {"include_stop_in_text": True, "stop_strings": ("r", "\n")},
    "special_tokens": {"skip_special_tokens": False, "logit_bias": {EOS_ID: 6.0}},
    "session": {"session_id": "s"},
    "salt": {"salt": "s"},
    "bypass": {"bypass_prefix_cache": True},
    "chat": {"chat": True, "tools_json": TOOLS},
    "reasoning": {"chat": True, "template_args_json": '{"thinks": true}'},
    "schema": {"json_schema": SCHEMA},
    "object": {"json_object": True},
    "regex": {"regex": "[a-z]{2,9}( [a-z]+)*"},
    "choices": {"choices": ["abc", "return n", "yes"]},
    "grammar": {"grammar": 'start: "ab"? word+\nword: /[a-z]/ | " = " | "(" word ")"'},
    "protobuf": {"message_type": Usage},
    "called": {"chat": True, "tools_json": TOOLS, "tool_choice": "required"},
}
#: An output has one of them.
CONSTRAINTS = frozenset({"schema", "object", "regex", "choices", "grammar", "protobuf", "called"})
#: A request may be refused where it has two of them.
ALONE = CONSTRAINTS | {"continued", "outputs", "allowed"}
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
    """Return the outputs, or the error."""
    try:
        return complete(llm, one)
    except RequestError as error:
        return error.reason


@contextmanager
def model() -> Iterator[str]:
    """Yield the embedded model with a template whose answers have parts."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model")
        shutil.copytree(demo.DRAFT, path)
        (path / "chat_template.jinja").write_text(TEMPLATE)
        yield str(path)


@contextmanager
def alone(device: str, **flags: str) -> Iterator[LLM]:
    sizes = {"max_num_seqs": 2, "num_blocks": 64} | flags
    with model() as path, LLM(path, device=device, dtype="float32", enable_prefix_caching=False, **sizes) as llm:
        yield llm


@contextmanager
def crowded(device: str, **flags: str) -> Iterator[LLM]:
    """Use few blocks and small steps, so that sequences are preempted, prompts are split and steps overlap."""
    sizes = {"max_num_seqs": 8, "num_blocks": 14, "block_size": 8, "max_num_batched_tokens": 24} | flags
    with model() as path, LLM(path, device=device, dtype="float32", async_depth=1, **sizes) as llm:
        yield llm


def combined() -> list[tuple[str, ...]]:
    """Return each option, each pair, most of them within triples, and some other triples."""
    pairs = {frozenset(pair) for pair in combinations(FEATURES, 2)}
    missing = {pair for pair in pairs if len(pair & ALONE) < 2}
    fit = [triple for triple in combinations(FEATURES, 3) if len(ALONE & set(triple)) < 2]
    random.Random(0).shuffle(fit)
    chosen = fit[: examples(100)]
    for least in (3, 2, 1):
        for triple in fit:
            found = {frozenset(pair) for pair in combinations(triple, 2)} & missing
            if len(found) >= least:
                chosen.append(triple)
                missing -= found
    # Most of these are refused.
    others = [pair for pair in combinations(FEATURES, 2) if len(ALONE & set(pair)) == 2]
    return [*((name,) for name in FEATURES), *dict.fromkeys(chosen), *others]


def answers_alone(llm: LLM) -> dict[tuple[str, ...], list[Output] | str]:
    answers = {each: answer(llm, request(each)) for each in combined()}
    refused = [each for each, told in answers.items() if isinstance(told, str)]
    assert all(len(ALONE & set(each)) >= 2 for each in refused), refused
    return answers


def answers_together(llm: LLM, names: Sequence[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], list[Output]]]:
    """Of each, 24 at a time, and those of PLAIN beside each 24, by the name ("plain",)."""
    for first in range(0, len(names), 24):
        called = names[first : first + 24]
        *answers, one, other = together(llm, [*map(request, called), *PLAIN])
        yield from zip(called, answers, strict=True)
        yield ("plain",), [*one, *other]
