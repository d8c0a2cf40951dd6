"""Log-probabilities through gRPC, compared with transformers' log-softmax, alone and beside others, and `LLM`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from photon_grpc import LLM, demo
from photon_grpc.client import Client, Generation, Output, Start, TokenScore
from photon_grpc.errors import InvalidRequest

TOLERANCE = 1e-4
LONG = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"


class Asked(NamedTuple):
    prompt: str
    options: dict[str, Any]


#: Chunked (16 tokens a step), preempted (14 blocks for eight outputs), ended in every way, and plain ones among them.
ASKED = (
    Asked(LONG, {"logprobs": 0, "temperature": 0, "max_tokens": 40}),
    Asked(LONG, {"logprobs": 5, "prompt_logprobs": 5, "temperature": 1.2, "seed": 1, "max_tokens": 40}),
    Asked("def fib(n):\n    ", {"temperature": 0, "max_tokens": 40}),
    Asked(LONG, {"logprobs": 20, "prompt_logprobs": 20, "num_outputs": 2, "seed": 2, "top_k": 5, "max_tokens": 24}),
    Asked(LONG + "\n        self", {"score_token_ids": [7, 206, 7], "temperature": 0.9, "seed": 3, "max_tokens": 40}),
    Asked("import os\n", {"logprobs": 2, "score_token_ids": [0], "stop_strings": ["\n"], "seed": 4, "max_tokens": 30}),
    Asked("x", {"prompt_logprobs": 3, "logprobs": 1, "temperature": 0, "stop_token_ids": range(0, 4096, 3)}),
    Asked(LONG, {"temperature": 0.8, "seed": 5, "max_tokens": 40}),
    Asked(LONG, {"prompt_logprobs": 0, "temperature": 0, "max_tokens": 40}),
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_num_batched_tokens=16, max_num_seqs=8, num_blocks=14, block_size=16) as llm:
        yield llm


@cache
def reference() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float32)


def log_softmax(ids: Sequence[int]) -> torch.Tensor:
    """Row i: of what follows the first i + 1 ids."""
    with torch.inference_mode():
        return torch.log_softmax(reference()(torch.tensor([list(ids)])).logits[0].float(), dim=-1)


async def streamed(target: str, asked: Asked) -> Generation:
    """Return a whole stream; check that every message has one score for each token."""
    async with Client(target) as client:
        stream = client.stream(asked.prompt, token_ids=True, prompt_token_ids=True, **asked.options)
        deltas = [delta async for delta in stream]
    is_scored = "logprobs" in asked.options or "score_token_ids" in asked.options
    for delta in deltas:
        assert tuple(score.token_id for score in delta.scores) == (delta.token_ids if is_scored else ())
    outputs = []
    for index in range(asked.options.get("num_outputs", 1)):
        mine = [delta for delta in deltas if delta.index == index]
        finish = mine[-1].finish
        assert finish is not None
        ids = sum((delta.token_ids for delta in mine), ())
        scores = sum((delta.scores for delta in mine), ())
        outputs.append(Output(index, "".join(delta.text for delta in mine), ids, finish, scores))
    assert isinstance(stream.start, Start) and stream.usage is not None and stream.timing is not None
    start = stream.start
    return Generation(
        start.request_id,
        start.model,
        start.seed,
        tuple(outputs),
        stream.usage,
        stream.timing,
        start.prompt_token_ids,
        start.prompt_scores,
    )


async def whole(target: str, asked: Asked) -> Generation:
    async with Client(target) as client:
        return await client.generate(asked.prompt, token_ids=True, prompt_token_ids=True, **asked.options)


@pytest.fixture(scope="module")
def alone(target: str) -> list[Generation]:
    return [asyncio.run(streamed(target, asked)) for asked in ASKED]


def check_position(score: TokenScore, logprobs: torch.Tensor, num_best: int, given: Sequence[int]) -> None:
    best, others = score.candidates[:num_best], score.candidates[num_best:]
    assert score.logprob is not None and [each.token_id for each in others] == list(given)
    for each in (score, *score.candidates):
        assert each.logprob == pytest.approx(logprobs[each.token_id].item(), abs=TOLERANCE)
        num_above = int((logprobs > logprobs[each.token_id] + TOLERANCE).sum())
        num_near = int((logprobs > logprobs[each.token_id] - TOLERANCE).sum())
        assert num_above < each.rank <= num_near
    assert [each.rank for each in best] == list(range(1, num_best + 1))
    assert [each.logprob for each in best] == pytest.approx(logprobs.topk(num_best).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("at", range(len(ASKED)))
def test_scores_are_the_log_softmax_of_transformers(at: int, alone: list[Generation]) -> None:
    options, result = ASKED[at].options, alone[at]
    prompt_ids, num_prompt = result.prompt_token_ids, len(result.prompt_token_ids)
    given = list(options.get("score_token_ids", ()))
    is_scored = "logprobs" in options or bool(given)
    for output in result.outputs:
        table = log_softmax([*prompt_ids, *output.token_ids])
        assert len(output.scores) == (len(output.token_ids) if is_scored else 0)
        for place, score in enumerate(output.scores):
            check_position(score, table[num_prompt + place - 1], options.get("logprobs", 0), given)
    if "prompt_logprobs" not in options:
        assert result.prompt_scores == ()
        return
    first, *others = result.prompt_scores
    assert first == TokenScore(prompt_ids[0], None, 0, first.token_bytes)
    assert tuple(score.token_id for score in result.prompt_scores) == prompt_ids
    table = log_softmax(prompt_ids)
    for place, score in enumerate(others):
        check_position(score, table[place], options["prompt_logprobs"], ())
    assert result.usage.cached_prompt_tokens == 0


def test_bytes_of_tokens_join_to_the_text(alone: list[Generation]) -> None:
    for asked, result in zip(ASKED, alone, strict=True):
        for output in result.outputs:
            spelled = b"".join(score.token_bytes for score in output.scores)
            if spelled and output.finish.reason == "MAX_TOKENS":
                assert spelled.decode(errors="replace") == output.text
        if result.prompt_scores:
            assert b"".join(score.token_bytes for score in result.prompt_scores).decode().endswith(asked.prompt)


def same_scores(mine: Sequence[TokenScore], theirs: Sequence[TokenScore]) -> None:
    """Other rows in a batch may change the last bits of a logit."""
    assert [score.token_id for score in mine] == [score.token_id for score in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [each.logprob for each in one.candidates] == pytest.approx(
            [each.logprob for each in other.candidates], abs=TOLERANCE
        )


def test_all_at_once_each_is_what_it_is_alone(target: str, alone: list[Generation]) -> None:
    async def together() -> list[Generation]:
        ways = (streamed, whole)
        calls = [ways[at % 2](target, asked) for at, asked in enumerate((*ASKED, *reversed(ASKED)))]
        return await asyncio.gather(*calls)

    results = asyncio.run(together())
    assert any(result.timing.preemption_count for result in results)
    for result, expected in zip(results, [*alone, *reversed(alone)], strict=True):
        for mine, theirs in zip(result.outputs, expected.outputs, strict=True):
            assert (mine.token_ids, mine.text, mine.finish) == (theirs.token_ids, theirs.text, theirs.finish)
            same_scores(mine.scores, theirs.scores)
        same_scores(result.prompt_scores, expected.prompt_scores)


def test_an_llm_gives_the_same(llm: LLM, alone: list[Generation]) -> None:
    for at in (1, 5, 6):
        asked, expected = ASKED[at], alone[at]
        completions = llm.generate(asked.prompt, **asked.options)
        for mine, theirs in zip(completions, expected.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            same_scores(mine.scores, theirs.scores)
            same_scores(mine.prompt_scores, expected.prompt_scores)


def test_a_continued_output_scores_what_is_new(llm: LLM) -> None:
    options: dict[str, Any] = {"logprobs": 3, "temperature": 0.9, "seed": 8, "ignore_eos": True, "max_tokens": 12}
    (uncut,) = llm.generate(LONG, **options)
    (rest,) = llm.generate(LONG, continue_from=uncut.token_ids[:5], prompt_logprobs=1, **options)
    same_scores(rest.scores, uncut.scores[5:])
    assert len(rest.scores) == 7 and rest.prompt_scores == ()


@pytest.mark.parametrize(
    ("options", "field", "numbers"),
    [
        ({"logprobs": 21}, "output.logprobs", (21, 20)),
        ({"prompt_logprobs": 2**32 - 1}, "output.prompt_logprobs", (2**32 - 1, 20)),
        ({"score_token_ids": []}, "output.score_token_ids.ids", ()),
        ({"score_token_ids": range(21)}, "output.score_token_ids.ids", (21, 20)),
        ({"score_token_ids": [10**6]}, "output.score_token_ids.ids[0]", (10**6,)),
    ],
)
def test_what_cannot_be_scored_is_refused_with_both_numbers(
    target: str, options: dict[str, Any], field: str, numbers: tuple[int, ...]
) -> None:
    for call in (streamed, whole):
        with pytest.raises(InvalidRequest) as caught:
            asyncio.run(call(target, Asked("x", options)))
        assert caught.value.field == field and all(str(number) in caught.value.message for number in numbers)
