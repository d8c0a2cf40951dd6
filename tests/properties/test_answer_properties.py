"""The parts of an answer: those that a text was written from, whatever messages it comes in and wherever it is cut."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.ask import ChatInput, ChatMessage
from photon_grpc.core.generation import ToolCall
from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.output.answer import Answer, AnswerFormat, joined_answer
from photon_grpc.frontend.output.call_ids import CallIds
from photon_grpc.frontend.output.output import OutputText
from photon_grpc.frontend.output.stop_strings import StopMatcher, StopStrings
from photon_grpc.frontend.output.update import OutputDelta
from tests.examples import examples
from tests.frontend.answer_templates import QWEN3
from tests.frontend.small_tokenizers import definition
from tests.frontend.test_answer import MALFORMED

QWEN = AnswerFormat.of(QWEN3)
IDS = CallIds("r", 0, 1)
CHAT = ChatInput((ChatMessage("user", "hi"),), tools_json='[{"name": "f"}]')
WORDS = st.sampled_from(
    ["a", " ", "\n", "é日", "🙂", "{", "}", '"', "<", "</", "<tool", "</tool_call>", "<think>", "\\"]
)
TEXTS = st.lists(WORDS, max_size=5).map("".join)
STRINGS = st.one_of(TEXTS, st.just("<tool_call>"), st.just('{"name": "g", "arguments": {}}'))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), STRINGS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)),
    max_leaves=6,
)
CALLS = st.builds(
    dict, name=STRINGS.filter(bool), arguments=st.dictionaries(STRINGS, VALUES, max_size=3), is_ascii=st.booleans()
)
#: An open string hides what follows it; an opening is one with what follows it.
WRONG = st.sampled_from([text for text in MALFORMED if not text.endswith(('"', "<tool_call>", "  "))])


@lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer(definition("byte_level"))


def written(pieces: list[Any]) -> tuple[str, str, list[dict[str, Any]]]:
    """Return a text, its content and its calls."""
    text, content, calls = "", "", []
    for piece in pieces:
        if isinstance(piece, dict):
            call = {"name": piece["name"], "arguments": piece["arguments"]}
            text += f"<tool_call>\n{json.dumps(call, ensure_ascii=piece['is_ascii'])}\n</tool_call>"
            calls.append(call)
        else:
            text += piece
            content += piece
    return text, content, calls


def parts(pieces: list[str]) -> Answer:
    parser = QWEN.parser(CHAT, "", IDS)
    told = []
    for piece in pieces:
        parser.push(piece)
        told.append(parser.take(is_over=False))
    return joined_answer([*told, parser.take(is_over=True)])


def read(calls: tuple[ToolCall, ...]) -> list[dict[str, Any]]:
    assert [call.index for call in calls] == list(range(len(calls)))
    return [{"name": call.name, "arguments": json.loads(call.arguments_json)} for call in calls]


@settings(max_examples=examples(120), deadline=None)
@given(
    thoughts=st.none() | st.lists(WORDS.filter(lambda word: word != "<think>"), max_size=5).map("".join),
    pieces=st.lists(st.one_of(TEXTS, CALLS, WRONG), max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_what_was_written_is_read_however_it_is_cut(thoughts: str | None, pieces: list[Any], cuts: list[int]) -> None:
    text, content, calls = written(["x", *pieces])
    if thoughts is not None:
        text = f"<think>{thoughts}</think>{text}"
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    answer = parts([text[a:b] for a, b in pairwise(borders)])
    assert (answer.reasoning, answer.content, read(answer.tool_calls)) == (thoughts or "", content, calls)


@settings(max_examples=examples(120), deadline=None)
@given(text=st.lists(st.one_of(WORDS, WRONG, st.just("<tool_call>")), max_size=12).map("".join), cut=st.integers(1, 5))
def test_messages_cannot_change_the_parts(text: str, cut: int) -> None:
    assert parts([text[at : at + cut] for at in range(0, len(text), cut)]) == parts([text])


def output() -> OutputText:
    return OutputText(
        0,
        detokenizer=tokenizer().detokenizer(),
        matcher=StopMatcher(StopStrings(("STOP", "</tool_caller>"))),
        wants_ids=True,
        parser=QWEN.parser(CHAT, "", IDS),
    )


def deltas(output: OutputText, ids: tuple[int, ...]) -> list[OutputDelta]:
    """Of one message a token; the last of them ends the output."""
    told = []
    for token_id in ids:
        is_over = output.push(token_id)
        told.append(output.take())
        if is_over:
            return told
    output.end(FinishReason.MAX_TOKENS)
    return [*told, output.take()]


@settings(max_examples=examples(12), deadline=None)
@given(pieces=st.lists(st.one_of(TEXTS, CALLS, st.just("STOP")), max_size=3), reasons=st.booleans())
def test_a_continued_output_has_the_rest(pieces: list[Any], reasons: bool) -> None:
    text = ("<think>é\n</think>" if reasons else "") + written(pieces)[0]
    ids = tokenizer().encode(text, add_special_tokens=False)
    uncut = deltas(output(), ids)
    for cut in range(1, len(uncut)):
        given_ids = tuple(id for delta in uncut[:cut] for id in delta.token_ids)
        rest = output()
        rest.replay(given_ids)
        continued = deltas(rest, ids[len(given_ids) :]) if rest.finish is None else [rest.take()]
        assert joined_answer([each.answer for each in continued]) == joined_answer(
            [each.answer for each in uncut[cut:]]
        )
