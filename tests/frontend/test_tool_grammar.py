"""Grammars of tool calls: accepted texts, the calls that the answer parser finds in them, and refused tools."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from photon_grpc.core.ask import ChatInput, ChatMessage, ConstraintAsk
from photon_grpc.core.call_form import BARE, LISTED, TAGGED, CallForm
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import InvalidConstraint, InvalidRequest
from photon_grpc.frontend.constraints.trial import byte_tokenizer, try_out
from photon_grpc.frontend.encoder_jobs import ANSWER, JOB, TryConstraint, perform
from photon_grpc.frontend.output.answer import Answer, AnswerFormat
from photon_grpc.frontend.output.call_ids import CallIds
from tests.frontend.answer_templates import DEEPSEEK, LLAMA3, QWEN3
from tests.frontend.fake_engine import served
from tests.frontend.small_tokenizers import definition

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Rain?", "parameters": WEATHER}},
    {"name": 'say "hi"\n<é>', "parameters": {"properties": {"a": {}, "b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}},
    {"name": "now", "parameters": None},
]
OSLO = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
TAGGED_OSLO = f"<tool_call>\n{OSLO}\n</tool_call>"
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
FORM = CallForm(TAGGED)
IDS = CallIds("r", 0, 1)


def ask(form: CallForm = FORM, name: str | None = None, tools: Any = TOOLS) -> ConstraintAsk:
    return ConstraintAsk("tool_calls", json.dumps(tools), () if name is None else (name,), form=form)


def satisfies(text: str, constraint: Constraint) -> bool:
    """Return whether all of `text` is a sentence of the grammar."""
    matcher = llguidance.LLMatcher(byte_tokenizer(), constraint.grammar)
    assert not matcher.get_error()
    given = list(text.encode())
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()


def read(text: str, format: AnswerFormat, prompt_end: str = "") -> Answer:
    chat = ChatInput((ChatMessage("user", "hi"),), tools_json=json.dumps(TOOLS))
    parser = format.parser(chat, prompt_end, IDS)
    parser.push(text)
    return parser.take(is_over=True)


@pytest.mark.parametrize(
    ("text", "is_one", "is_many"),
    [
        (TAGGED_OSLO, True, True),
        (NOW, False, True),
        (f"{TAGGED_OSLO}\n{NOW}\n{TAGGED_OSLO}", False, True),
        (f"{TAGGED_OSLO} {NOW}", False, False),
        (TAGGED_OSLO.replace("Oslo", 'a, b: "'.replace('"', r"\"")), True, True),
        (TAGGED_OSLO.replace('"days"', '"humour"'), False, False),
        (TAGGED_OSLO.replace(": 2", ": 0"), False, False),
        (TAGGED_OSLO.replace(', "days": 2', ""), True, True),
        (TAGGED_OSLO.replace('"city": "Oslo", ', ""), False, False),
        (TAGGED_OSLO.replace("weather", "climate"), False, False),
        (TAGGED_OSLO.replace("arguments", "parameters"), False, False),
        (NOW.replace("{}", '{"a": 1}'), False, False),
        (OSLO, False, False),
        (f"Well: {TAGGED_OSLO}", False, False),
        (f"{TAGGED_OSLO}.", False, False),
        ("", False, False),
    ],
)
def test_tagged_calls_are_recognized(text: str, is_one: bool, is_many: bool) -> None:
    assert satisfies(text, try_out(ask(name="weather"))) == is_one
    assert satisfies(text, try_out(ask())) == is_many


def test_every_tool_can_be_called_by_any_name() -> None:
    for tool, arguments in (("weather", {"city": "x"}), ('say "hi"\n<é>', {"a": [1], "b": None}), ("now", {})):
        call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
        text = f"<tool_call>\n{call}\n</tool_call>"
        assert satisfies(text, try_out(ask())) and satisfies(text, try_out(ask(name=tool)))
        (told,) = read(text, AnswerFormat.of(QWEN3)).tool_calls
        assert (told.name, json.loads(told.arguments_json)) == (tool, arguments)


def test_a_name_may_hold_any_character() -> None:
    name = "".join(map(chr, [*range(32), 127, 0x2028, 0x1F600]))
    constraint = try_out(ask(tools=[{"name": name}]))
    call = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert satisfies(f"<tool_call>\n{call}\n</tool_call>", constraint)


def test_a_bare_call_stands_alone() -> None:
    bare = OSLO.replace("arguments", "parameters")
    for name in (None, "weather"):
        constraint = try_out(ask(CallForm(BARE), name))
        assert satisfies(bare, constraint)
        assert not satisfies(OSLO, constraint)
        assert not satisfies(f"{bare}; {bare}", constraint)
        assert not satisfies(f"<|python_tag|>{bare}", constraint)
    expected = Answer(tool_calls=(ToolCall(0, "weather", '{"city": "Oslo", "days": 2}', IDS.of(0)),))
    assert read(bare, AnswerFormat.of(LLAMA3)) == expected


@pytest.mark.parametrize(
    ("before", "can_be_optional", "can_be_open"),
    [
        ("", True, False),
        ("<think>Oslo? {</think>", True, True),
        ("<think>\n<tool_call> a < b </thin\n</think>\n\n", True, True),
        ("<think></think>\n", True, True),
        ("Hm.</think>\n\n", False, True),
        ("<think>a</think>\n\n\n", False, False),
        ("<think>a</think>So: ", False, False),
        ("<think>a", False, False),
    ],
)
def test_reasoning_comes_first(before: str, can_be_optional: bool, can_be_open: bool) -> None:
    text = before + TAGGED_OSLO
    assert satisfies(text, try_out(ask(CallForm(TAGGED, "optional")))) == can_be_optional
    assert satisfies(text, try_out(ask(CallForm(TAGGED, "open")))) == can_be_open
    assert satisfies(text, try_out(ask())) == (before == "")
    for prompt_end, is_taken in (("", can_be_optional), ("<think>\n", can_be_open)):
        if is_taken:
            answer = read(text, AnswerFormat.of(QWEN3), prompt_end)
            assert ([call.name for call in answer.tool_calls], answer.content.strip()) == (["weather"], "")


def test_the_prompt_says_where_reasoning_may_stand() -> None:
    qwen = AnswerFormat.of(QWEN3)
    assert qwen.call_form("<|im_start|>assistant\n") == CallForm(TAGGED, "optional")
    assert qwen.call_form("assistant\n<think>\n") == CallForm(TAGGED, "open")
    assert qwen.call_form("<think>\n\n</think>\n\n") == CallForm(TAGGED, "none")
    assert AnswerFormat.of(LLAMA3).call_form("<think>") == CallForm(BARE, "none")
    assert AnswerFormat.of(DEEPSEEK).call_form("<think>\n") is None
    assert AnswerFormat.of(QWEN3, ["</tool_call>"]).call_form("") is None, "a special mark releases no text"


def test_a_mark_that_is_a_token_is_sampled_as_that_token() -> None:
    tokenizer = Tokenizer.from_str(definition("byte_level"))
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    size = tokenizer.get_vocab_size()
    mark = tokenizer.token_to_id("<tool_call>")
    vocabulary = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size)
    matcher = llguidance.LLMatcher(vocabulary, try_out(ask()).grammar)
    mask = matcher.compute_bitmask()
    assert [id for id in range(size) if mask[id // 8] >> id % 8 & 1] == [mark]
    for spelled in ("<tool_call>", "<tool"):
        ids = [id for char in spelled for id in tokenizer.encode(char, add_special_tokens=False).ids]
        assert matcher.deep_copy().try_consume_tokens(ids) == len(ids), "nor is it wrong in other tokens"


@pytest.mark.parametrize(
    ("tools", "name", "field", "words"),
    [
        (TOOLS, "climate", "chat.tool_choice.name", "no tool 'climate'; tools_json has weather, say"),
        (TOOLS, "", "chat.tool_choice.name", "no tool ''"),
        ([], None, "chat.tools_json", "no tools"),
        ({"name": "a"}, None, "chat.tools_json", "must be a JSON array"),
        ([1], None, "chat.tools_json", r"\[0\]: must be a JSON object"),
        ([{"function": 1}], None, "chat.tools_json", r"\[0\].function: must be a JSON object"),
        ([{"name": "a"}, {"type": "web"}], None, "chat.tools_json", r"\[1\]: has no name"),
        ([{"name": 1}], None, "chat.tools_json", r"\[0\].name: must be a JSON string"),
        ([{"name": "a"}, {"name": "a"}], None, "chat.tools_json", r"\[1\]: there is another tool 'a'"),
        ([{"name": "a", "parameters": True}], "a", "chat.tools_json", "tool 'a': must be a JSON object"),
        (
            [{"name": "a", "parameters": {"type": "array"}}],
            None,
            "chat.tools_json",
            "tool 'a': must be of type 'object', got 'array'",
        ),
        ([{"name": "a", "parameters": {"type": 5}}], None, "chat.tools_json", "tool 'a': type: must be"),
    ],
)
def test_an_unknown_tool_is_refused(tools: Any, name: str | None, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        try_out(ask(name=name, tools=tools))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, r'tool \'bad\': at /properties/a: Unimplemented keys: \["not"\]'),
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "tool 'bad': Unsatisfiable schema"),
        ({"enum": ["a", 1]}, "tool 'bad': Unsatisfiable schema"),
        ({"properties": 3}, "tool 'bad': "),
        ({"properties": {"a": {"const": "\x01"}}}, "tool 'bad': the only control characters"),
    ],
)
def test_parameters_that_the_compiler_refuses_are_named(parameters: Any, words: str) -> None:
    tools = [*TOOLS, {"name": "bad", "parameters": parameters}]
    for name in (None, "bad"):
        with pytest.raises(InvalidConstraint, match=words) as refused:
            try_out(ask(name=name, tools=tools))
        assert refused.value.field == "chat.tools_json"
    assert satisfies(TAGGED_OSLO, try_out(ask(name="weather", tools=tools))), "nobody asks for the other"


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "string"}, {"type": "object"}]}}},
        {"anyOf": [{"type": "number"}, {"properties": {"a": {"type": "integer"}}}]},
        {"x-guidance": {"whitespace_flexible": True, "item_separator": ";"}},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_allows(parameters: Any) -> None:
    constraint = try_out(ask(name="f", tools=[{"name": "f", "parameters": parameters}]))
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert satisfies(call % '{"a": 1, "b": [2, 3]}', constraint)
    for other in ("null", "1", '"a"', "[]", '{"a":1}', '{ "a": 1}'):
        assert not satisfies(call % other, constraint), other


def test_a_trial_crosses_to_the_encoder_and_back() -> None:
    asked = ask(CallForm(BARE, "open"), "weather")
    model = served("byte_level")
    job = JOB.decode(msgspec.msgpack.encode(TryConstraint(asked)))
    answer = ANSWER.decode(msgspec.msgpack.encode(perform(job, model)))
    assert (job, msgspec.structs.replace(answer.constraint, least_tokens=0)) == (TryConstraint(asked), try_out(asked))
    refusal = ANSWER.decode(msgspec.msgpack.encode(perform(TryConstraint(ask(name="none")), model)))
    assert refusal.fault.error().field == "chat.tool_choice.name"


def test_parameters_may_refer_to_exclusive_branches() -> None:
    defs = {name: {"properties": {"k": {"const": name}}, "type": "object", "required": ["k"]} for name in ("a", "b")}
    parameters = {"properties": {"x": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}}, "$defs": defs}
    constraint = try_out(ask(tools=[{"name": "f", "parameters": parameters}]))
    call = '<tool_call>\n{"name": "f", "arguments": {"x": {"k": "%s"}}}\n</tool_call>'
    assert satisfies(call % "b", constraint) and not satisfies(call % "c", constraint)


@pytest.mark.parametrize(
    ("text", "is_one", "is_many"),
    [
        (f"[{OSLO}]", True, True),
        (f'[{OSLO}, {{"name": "now", "arguments": {{}}}}]', False, True),
        (OSLO, False, False),
        (f"[{OSLO}", False, False),
        ("[]", False, False),
        (f"[TOOL_CALLS][{OSLO}]", False, False),
    ],
)
def test_a_list_of_calls_is_accepted_and_read(text: str, is_one: bool, is_many: bool) -> None:
    form = CallForm(LISTED)
    assert satisfies(text, try_out(ask(form, "weather"))) is is_one
    assert satisfies(text, try_out(ask(form))) is is_many
    if is_many:
        answer = read(text, AnswerFormat(calls=LISTED))
        assert answer.content == "" and len(answer.tool_calls) == text.count('"name"')
