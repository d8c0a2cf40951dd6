"""Calls that the embedded model must make: in one program and through gRPC, and always such as their tools take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from photon_grpc import LLM, demo
from photon_grpc.client import Client, Generation, SyncClient, ToolCall
from photon_grpc.compose.llm import Completion
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import FeatureNotSupported, InvalidConstraint, InvalidRequest, PhotonError
from tests.frontend.answer_templates import DEEPSEEK, LLAMA3, QWEN3
from tests.server.test_answers import unnamed

CHAT = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NUMBERS = {
    "type": "object",
    "properties": {
        "xs": {
            "type": "array",
            "items": {"type": "integer", "minimum": -99, "maximum": 99},
            "minItems": 1,
            "maxItems": 3,
        }
    },
    "required": ["xs"],
    "additionalProperties": False,
}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
        {"name": 'add "up"', "parameters": NUMBERS},
        {"name": "now"},
    ]
)
#: The prompt of Qwen's template then closes the reasoning.
STRAIGHT = {"tools_json": TOOLS, "template_args_json": '{"enable_thinking": false}'}


def is_weather(given: Any) -> bool:
    return (
        given.keys() <= {"city", "days", "unit"}
        and isinstance(given["city"], str)
        and 1 <= len(given["city"]) <= 8
        and isinstance(given.get("days", 1), int)
        and 1 <= given.get("days", 1) <= 9
        and given["unit"] in ("c", "f")
    )


def is_numbers(given: Any) -> bool:
    xs = given["xs"]
    return given.keys() == {"xs"} and 1 <= len(xs) <= 3 and all(isinstance(x, int) and abs(x) < 100 for x in xs)


#: What the schemas say, written again without them.
TAKES: dict[str, Callable[[Any], bool]] = {
    "weather": is_weather,
    'add "up"': is_numbers,
    "now": lambda given: given == {},
}


def check_calls(calls: Sequence[ToolCall], names: Sequence[str]) -> None:
    for number, call in enumerate(calls):
        assert call.index == number and call.name in names
        assert TAKES[call.name](json.loads(call.arguments_json)), call


def model_with(template: str, directory: Path) -> Path:
    shutil.copytree(demo.DRAFT, directory, symlinks=True)
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = model_with(QWEN3, tmp_path_factory.mktemp("qwen") / "model")
    with LLM(model, device="cpu", max_num_seqs=48, num_blocks=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = model_with(LLAMA3, tmp_path_factory.mktemp("llama") / "model")
    with LLM(model, device="cpu", max_num_seqs=48, num_blocks=1024) as llm:
        yield llm


def ids(llm: LLM, text: str) -> tuple[int, ...]:
    tokenizer = llm._program._frontend._model.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text, add_special_tokens=False)


def ask(llm: LLM, choice: str | None, **options: Any) -> list[Completion]:
    given: dict[str, Any] = {"temperature": 1.5, "max_tokens": 160} | STRAIGHT | options
    return llm.generate([CHAT], chat=True, tool_choice=choice, **given)


def many(llm: LLM, choice: str, **options: Any) -> list[Completion]:
    """Sixteen outputs of each of three chats, in one batch: a step takes little longer with all rows than with few."""
    given: dict[str, Any] = {"temperature": 1.5, "max_tokens": 100, "num_outputs": 16, "seed": 0} | STRAIGHT | options
    chats = [[{"role": "user", "content": text}] for text in ("hi", "Oslo?", "1 + 2")]
    return llm.generate(chats, chat=True, tool_choice=choice, **given)


def test_the_one_tool_is_called_once(llm: LLM) -> None:
    for name in TAKES:
        for output in many(llm, name):
            assert output.finish_reason is FinishReason.CONSTRAINT_COMPLETE
            assert (len(output.tool_calls), output.content, output.reasoning) == (1, "", "")
            check_calls(output.tool_calls, [name])


def test_typed_tools_are_called_like_those_in_json(llm: LLM) -> None:
    tools = [{"name": "weather", "parameters": WEATHER}, {"function": {"name": "add", "parameters": NUMBERS}}]
    given: dict[str, Any] = {"tools": tools, "tools_json": None, "seed": 4, "num_outputs": 2}
    for name in ("weather", "add"):
        outputs = ask(llm, name, **given)
        assert {output.finish_reason for output in outputs} == {FinishReason.CONSTRAINT_COMPLETE}
        assert is_weather(json.loads(outputs[0].tool_calls[0].arguments_json)) == (name == "weather")
    loose = [{**tools[0], "strict": False}]
    assert not all(
        is_weather(json.loads(output.tool_calls[0].arguments_json))
        for output in ask(llm, "weather", **given | {"tools": loose, "num_outputs": 4, "max_tokens": 400})
        if output.tool_calls
    )


def test_any_tools_are_called(llm: LLM) -> None:
    outputs = many(llm, "required")
    for output in outputs:
        check_calls(output.tool_calls, list(TAKES))
        is_cut = output.finish_reason is FinishReason.MAX_TOKENS
        assert is_cut or (output.tool_calls and not output.content.strip())
    assert {call.name for output in outputs for call in output.tool_calls} == set(TAKES)
    assert max(len(output.tool_calls) for output in outputs) > 1


def test_bare_objects_are_calls(llama: LLM) -> None:
    outputs = many(llama, "required", template_args_json="")
    for output in outputs:
        assert output.finish_reason is FinishReason.CONSTRAINT_COMPLETE
        assert (len(output.tool_calls), output.content) == (1, "")
        check_calls(output.tool_calls, list(TAKES))
    assert {call.name for output in outputs for call in output.tool_calls} == set(TAKES)


def test_a_call_that_is_chosen_by_nobody_is_left_to_the_model(llm: LLM) -> None:
    (plain,), (auto,) = ask(llm, None, seed=3, max_tokens=8), ask(llm, "auto", seed=3, max_tokens=8)
    assert plain.token_ids == auto.token_ids
    (called,) = ask(llm, "now", seed=3)
    assert called.text != plain.text


def test_reasoning_goes_on_up_to_its_mark(llm: LLM) -> None:
    begun = ids(llm, "<think>Rain {")
    (thinks,) = ask(llm, "now", template_args_json="", continue_from=begun, seed=1, max_tokens=len(begun) + 4)
    assert (thinks.finish_reason, thinks.tool_calls, thinks.content) == (FinishReason.MAX_TOKENS, (), "")
    assert thinks.reasoning == thinks.text != ""
    thought = ids(llm, "<think>Rain {</think>")
    (output,) = ask(llm, "now", template_args_json="", continue_from=thought, seed=1)
    assert output.finish_reason is FinishReason.CONSTRAINT_COMPLETE
    assert (unnamed(output.tool_calls), output.content.strip()) == ((ToolCall(0, "now", "{}"),), "")


def test_a_cut_call_goes_on_to_the_same_call(llm: LLM) -> None:
    (whole,) = ask(llm, "weather", seed=5)
    for cut in range(1, len(whole.token_ids), 3):
        (rest,) = ask(llm, "weather", seed=5, continue_from=whole.token_ids[:cut])
        assert whole.token_ids[cut:] == rest.token_ids, cut
        assert unnamed(rest.tool_calls) == unnamed(whole.tool_calls), cut
    with pytest.raises(InvalidRequest, match="continue_from"):
        ask(llm, "weather", continue_from=ids(llm, "<tool_call>\n{}"))


def test_a_stop_string_behind_the_object_closes_the_call(llm: LLM) -> None:
    for output in ask(llm, "required", seed=2, stop_strings=["\n</tool_call>"], num_outputs=2):
        assert output.finish_reason is FinishReason.STOP_STRING
        assert (len(output.tool_calls), output.content) == (1, "")
        check_calls(output.tool_calls, list(TAKES))
    (cut,) = ask(llm, "weather", stop_strings=['"arguments"'])
    assert (cut.finish_reason, cut.tool_calls) == (FinishReason.STOP_STRING, ())


def test_the_end_of_the_context_cuts_a_call(llm: LLM) -> None:
    (cut,) = ask(llm, "weather", max_tokens=12)
    assert (cut.finish_reason, cut.tool_calls, cut.content) == (FinishReason.MAX_TOKENS, (), cut.text)


# --- through gRPC ----------------------------------------------------------------------------------------------------


def test_answers_and_streams_have_the_same_calls(llm: LLM, target: str) -> None:
    with SyncClient(target) as client:
        for choice in ("required", "weather"):
            options: Any = STRAIGHT | {
                "tool_choice": choice,
                "seed": 0,
                "temperature": 1.5,
                "max_tokens": 64,
                "num_outputs": 10,
            }
            outputs = client.generate(CHAT, **options).outputs
            deltas = list(client.stream(CHAT, **options))
            assert len(outputs) == 10
            for output in outputs:
                check_calls(output.tool_calls, list(TAKES) if choice == "required" else [choice])
                mine = [delta for delta in deltas if delta.index == output.index]
                assert unnamed([call for delta in mine for call in delta.tool_calls]) == unnamed(output.tool_calls)
                assert "".join(delta.text for delta in mine) == output.text
                is_complete = output.finish.reason in ("CONSTRAINT_COMPLETE", "EOS")
                assert output.tool_calls or not is_complete


async def test_on_a_shared_stream(llm: LLM, target: str) -> None:
    options: Any = STRAIGHT | {"tool_choice": "weather", "seed": 1, "temperature": 1.5}
    async with Client(target) as client, client.multiplex() as calls:
        result: Generation = await calls.generate(CHAT, **options)
        check_calls(result.tool_calls, ["weather"])
        assert len(result.tool_calls) == 1


BAD = json.dumps([{"name": "now"}, {"name": "bad", "parameters": {"properties": {"a": {"not": {}}}}}])
REFUSED: list[tuple[dict[str, Any], type[PhotonError], str, str]] = [
    ({"tools_json": ""}, InvalidRequest, "chat.tool_choice", "there are no tools"),
    ({"tools_json": "[]"}, InvalidRequest, "chat.tool_choice", "there are no tools"),
    ({"tools_json": '["{"]'}, InvalidRequest, "chat.tools_json", r"\[0\]: must be a JSON object"),
    ({"tool_choice": "climate"}, InvalidRequest, "chat.tool_choice.name", "no tool 'climate'"),
    ({"regex": "a"}, InvalidRequest, "chat.tool_choice", "structured_output.regex is set, too"),
    ({"tools_json": BAD}, InvalidConstraint, "chat.tools_json", "tool 'bad': at /properties/a: Unimplemented"),
]


@pytest.mark.parametrize(("options", "error", "field", "words"), REFUSED)
def test_what_no_call_can_obey_is_refused(
    llm: LLM, target: str, options: dict[str, Any], error: type[PhotonError], field: str, words: str
) -> None:
    asked: Any = {"tool_choice": "required", "max_tokens": 4} | STRAIGHT | options
    with SyncClient(target) as client:
        for call in (lambda: client.generate(CHAT, **asked), lambda: list(client.stream(CHAT, **asked))):
            with pytest.raises(error, match=words) as refused:
                call()
            assert refused.value.field == field
    with pytest.raises(error, match=words):
        llm.generate([CHAT], chat=True, **asked)


@pytest.mark.parametrize("template", [DEEPSEEK, None])
def test_a_template_without_known_calls_lacks_the_feature(template: str | None, tmp_path: Path) -> None:
    model = model_with(template, tmp_path / "model") if template else demo.TARGET
    with LLM(model, device="cpu", num_blocks=16) as llm, pytest.raises(FeatureNotSupported, match="TOOL_CALLS") as told:
        llm.generate([CHAT], chat=True, tools_json=TOOLS, tool_choice="required")
    assert told.value.field == "chat.tool_choice"
