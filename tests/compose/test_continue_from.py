"""A stream cut anywhere and continued is the uncut one: the same ids, the same text, the same end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from photon_grpc import LLM
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidRequest
from tests.service.tiny import write_tiny_model

PROMPT = "def fib(n):"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Random bytes: most characters come in pieces, many are none."""
    model = write_tiny_model(tmp_path_factory.mktemp("continue") / "tiny")
    with LLM(model, load_format="dummy", device="cpu", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(device="cpu", max_num_seqs=4, num_blocks=64) as llm:
        yield llm


class Message(NamedTuple):
    ids: tuple[int, ...]
    text: str
    reason: FinishReason | None


def messages(llm: LLM, **options: Any) -> list[Message]:
    return [
        Message(delta.token_ids, delta.text, delta.finish.reason if delta.finish else None)
        for delta in llm.stream(PROMPT, **options)
    ]


def joined(parts: list[Message]) -> Message:
    reason = parts[-1].reason if parts else None
    return Message(sum((part.ids for part in parts), ()), "".join(part.text for part in parts), reason)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 10},
    "drawn": {"temperature": 1.5, "seed": 3, "max_tokens": 16},
    "filtered": {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 4, "max_tokens": 10},
    "stop token": {"temperature": 1.5, "seed": 5, "max_tokens": 24, "stop_token_ids": range(0, 99, 5), "min_tokens": 9},
    "stop string": {"temperature": 1.5, "seed": 6, "max_tokens": 40, "stop_strings": ["a", "\u00e4", "zz", "("]},
    "stop shown": {
        "temperature": 1.2,
        "seed": 7,
        "max_tokens": 40,
        "stop_strings": ["e", "x"],
        "include_stop_in_text": True,
        "min_tokens": 6,
    },
}


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llm", "demo"])
def test_cut_after_any_message(model: str, way: str, request: pytest.FixtureRequest) -> None:
    options, program = WAYS[way], request.getfixturevalue(model)
    uncut = messages(program, **options)
    for cut in range(1, len(uncut)):
        before, after = joined(uncut[:cut]), joined(uncut[cut:])
        assert joined(messages(program, continue_from=before.ids, **options)) == after, f"cut after {cut} messages"


def test_usage_counts_the_given_ids_with_the_prompt(llm: LLM) -> None:
    whole = llm.generate(PROMPT, temperature=0, max_tokens=12)[0]
    rest = llm.generate(PROMPT, temperature=0, max_tokens=12, continue_from=whole.token_ids[:5])[0]
    assert (rest.prompt_tokens, len(rest.token_ids)) == (whole.prompt_tokens + 5, 7)
    assert rest.token_ids == whole.token_ids[5:]


def test_ids_that_are_the_whole_output_finish_at_once(llm: LLM) -> None:
    whole = llm.generate(PROMPT, temperature=0, max_tokens=6)[0]
    again = llm.generate(PROMPT, temperature=0, max_tokens=6, continue_from=whole.token_ids)[0]
    assert (again.token_ids, again.finish_reason) == ((), FinishReason.MAX_TOKENS)
    stopped = llm.generate(PROMPT, max_tokens=6, continue_from=[5, 9], stop_token_ids=[9])[0]
    assert (stopped.token_ids, stopped.finish_reason) == ((), FinishReason.STOP_TOKEN)
    spelled = tuple(ord(char) - ord("!") for char in "abc")
    ended = llm.generate(PROMPT, max_tokens=9, continue_from=spelled, stop_strings=["bc"])[0]
    assert (ended.token_ids, ended.text, ended.finish_reason) == ((), "", FinishReason.STOP_STRING)


def test_an_ending_before_min_tokens_is_none(llm: LLM) -> None:
    rest = llm.generate(PROMPT, max_tokens=6, min_tokens=2, continue_from=[5, 9], stop_token_ids=[9], temperature=0)[0]
    assert 1 <= len(rest.token_ids) <= 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"continue_from": [1, 2, 3], "max_tokens": 2}, InvalidRequest, "has 3 tokens; the output ends after 2"),
        ({"continue_from": [1, 999]}, InvalidRequest, r"continue_from.ids\[1\]: holds the id 999"),
        ({"continue_from": [1], "num_outputs": 2}, InvalidRequest, "num_outputs is 2"),
        ({"continue_from": [9, 1], "stop_token_ids": [9]}, InvalidRequest, "the output had ended"),
        ({"continue_from": [1] * 5000}, InvalidRequest, "has 5000 entries; 4096 are allowed"),
    ],
)
def test_what_cannot_be_continued_is_refused(llm: LLM, options: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        llm.generate(PROMPT, **options)
