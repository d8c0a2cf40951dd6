"""Requests with every option drawn at random, and what becomes of them alone and together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from hypothesis import Phase, settings
from hypothesis import strategies as st

from photon_grpc import LLM
from photon_grpc.core.generation import TokenScore, ToolCall
from tests.examples import examples

#: What the embedded model likes to say: as stop ids these end outputs, and where they are banned it is seen.
FREQUENT_IDS = (206, 284, 584, 95, 587, 10, 228, 15, 947, 21, 386, 335, 294, 85, 350, 598, 564, 291, 19, 16, 1, 551)
PROMPTS = ("def fib(n):\n    ", "class Stack:\n", "import os\n", "x", "for i in range(10):\n    print(", "# héé 日本\n")

ids = st.sampled_from(FREQUENT_IDS) | st.integers(0, 2000)
prompts = st.sampled_from(PROMPTS) | st.lists(ids, min_size=1, max_size=40)

#: Option of `LLM` -> its values; None: it is left out. Half of the requests have neither end nor ban, as those of
#: benchmarks.
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 10),
    "min_tokens": st.sampled_from([None, 0, 1, 4, 24, 24, 24]),
    "temperature": st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.5]),
    "top_p": st.none() | st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    "top_k": st.none() | st.sampled_from([-1, 1, 5, 50, 100_000]),
    "min_p": st.none() | st.sampled_from([0.0, 0.05, 1.0]),
    "seed": st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    "repetition_penalty": st.sampled_from([None, None, 1.0, 1.5, 0.8]),
    "presence_penalty": st.sampled_from([None, None, 2.0, -0.5]),
    "frequency_penalty": st.sampled_from([None, None, 0.7, -0.1]),
    "logit_bias": st.sampled_from([None, None, {}, {10: 5.0, 206: -100.0}]) | st.dictionaries(ids, st.floats(-9, 9)),
    # Besides what may be banned, so that there is always something to draw.
    "allowed_token_ids": st.sampled_from([None, None, list(range(0, 1024, 2)), [*FREQUENT_IDS, *range(600, 640)]]),
    "num_outputs": st.sampled_from([None, None, None, 1, 2, 3]),
    "stop_strings": st.sampled_from([(), (), (), ("\n",), ("e", "self."), (" ", "return")]),
    "stop_token_ids": st.sampled_from([[], [], list(FREQUENT_IDS)]) | st.lists(ids, max_size=4),
    "ignore_eos": st.sampled_from([True, True, False]),
    "include_stop_in_text": st.booleans(),
    "skip_special_tokens": st.booleans(),
    # One that never ends anything: when it would depends on the machine.
    "max_duration": st.none() | st.just(3600.0),
    "priority": st.integers(-3, 3),
    "speculation": st.none() | st.integers(0, 7),
    "session_id": st.sampled_from([None, "a", "b"]),
    "salt": st.sampled_from([None, None, "a", "b"]),
    "bypass_prefix_cache": st.sampled_from([None, None, False, True]),
    "continue_from": st.none() | st.none() | st.lists(ids, min_size=1, max_size=6),
    "logprobs": st.sampled_from([None, None, 0, 1, 5, 20]),
    "prompt_logprobs": st.sampled_from([None, None, None, 0, 3]),
    "score_token_ids": st.none() | st.none() | st.lists(ids, min_size=1, max_size=3),
}


class DrawnRequest(NamedTuple):
    prompt: str | list[int]
    options: Mapping[str, Any]


class Logprob(float):
    """Equal to those that other rows in a batch may make of it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = float.__hash__


class Scored(NamedTuple):
    token_id: int
    logprob: Logprob
    #: Of the best, whose order may change where they are as good as equal, and of the given ids.
    candidates: tuple[Logprob, ...]
    given: tuple[int, ...]


class Output(NamedTuple):
    token_ids: tuple[int, ...]
    text: str
    #: A name of FinishReason.
    finish: str
    scores: tuple[Scored, ...]
    prompt_scores: tuple[Scored, ...]
    #: Of a chat: reasoning, content and calls.
    parts: tuple[str, str, tuple[ToolCall, ...]] = ("", "", ())
    #: Of typed output, serialized; None where there is none.
    message: bytes | None = None


def scored(one: DrawnRequest, scores: Sequence[TokenScore], *, is_prompt: bool = False) -> tuple[Scored, ...]:
    num_given = 0 if is_prompt else len(one.options.get("score_token_ids", ()))
    return tuple(
        Scored(
            score.token_id,
            Logprob(score.logprob or 0.0),
            tuple(Logprob(each.logprob) for each in score.candidates),
            tuple(each.token_id for each in score.candidates[len(score.candidates) - num_given :]),
        )
        for score in scores
    )


def _drawn(prompt: str | list[int], **options: Any) -> DrawnRequest:
    given = {name: value for name, value in options.items() if value is not None}
    if "min_tokens" in given:
        given["min_tokens"] = min(given["min_tokens"], given["max_tokens"])
    if "continue_from" in given:
        # One output, which has not ended yet.
        given["continue_from"] = given["continue_from"][: given["max_tokens"]]
        given |= {"stop_strings": (), "stop_token_ids": [], "ignore_eos": True, "num_outputs": 1}
    return DrawnRequest(prompt, given)


drawn_requests = st.lists(st.builds(_drawn, prompts, **OPTIONS), min_size=5, max_size=8)
#: What is left in a slot comes from examples before, so a smaller one would say nothing.
unshrunk = settings(max_examples=examples(12), phases=(Phase.generate,))


def complete(llm: LLM, one: DrawnRequest) -> list[Output]:
    """Its outputs, in order."""
    completions = llm.generate([one.prompt], **one.options)
    return [
        Output(
            each.token_ids,
            each.text,
            each.finish_reason.name,
            scored(one, each.scores),
            scored(one, each.prompt_scores, is_prompt=True),
            (each.reasoning, each.content, each.tool_calls),
            None if each.message is None else each.message.SerializeToString(deterministic=True),
        )
        for each in completions
    ]


def together(llm: LLM, many: Sequence[DrawnRequest]) -> list[list[Output]]:
    """All of them at once, as callers of their own."""
    with ThreadPoolExecutor(len(many)) as callers:
        return list(callers.map(partial(complete, llm), many))
