"""Tools and tool calls in the templates of real families, compared with transformers and with the same in JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Reference
from transformers import PreTrainedTokenizerFast

from photon_grpc.core.ask import ChatInput, ChatMessage, Tool, ToolChoice
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import FeatureNotSupported, InvalidRequest, PhotonError
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.frontend.input.chat_json import MAX_JSON_BYTES, MAX_JSON_DEPTH, MAX_JSON_NODES, check_json
from photon_grpc.frontend.input.chat_variables import check_tools
from photon_grpc.frontend.input.size import is_small
from tests.frontend.small_tokenizers import definition
from tests.frontend.tool_templates import MISTRAL, QWEN, TEMPLATES

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
    "required": ["city"],
}
NOTHING = {"type": "object", "properties": {}}
TOOLS = (Tool("weather", "Wetter für <b>alle</b>", json.dumps(CITY)), Tool("now"))
#: The same in the form of OpenAI's API, which is also that of transformers.
AS_JSON: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": TOOLS[0].description, "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": NOTHING}},
]
ARGUMENTS = {"city": "Zürich", "days": 2}
CALL = ToolCall(0, "weather", json.dumps(ARGUMENTS), "aZ09bcdef")
CALL_AS_JSON = {"id": CALL.id, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
BEFORE, AFTER = ChatMessage("user", "Umbrella?"), ChatMessage("tool", "rain", tool_call_id=CALL.id)
TYPED = ChatInput((BEFORE, ChatMessage("assistant", "", tool_calls=(CALL,)), AFTER), tools=TOOLS)
JSON = ChatInput(
    (BEFORE, ChatMessage("assistant", "", tool_calls_json=json.dumps([CALL_AS_JSON])), AFTER),
    tools_json=json.dumps(AS_JSON),
)


def rendered(source: str, chat: ChatInput) -> str:
    template = ChatTemplate(source, NAMES)
    return template.render(template.variables(chat))


@pytest.mark.parametrize("name", TEMPLATES)
def test_both_forms_are_the_prompt_that_transformers_renders(name: str) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Reference.from_str(definition("byte_level")), chat_template=TEMPLATES[name], **NAMES
    )
    messages = [
        {"role": "user", "content": "Umbrella?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL_AS_JSON]},
        {"role": "tool", "content": "rain", "tool_call_id": CALL.id},
    ]
    expected = reference.apply_chat_template(messages, tools=AS_JSON, add_generation_prompt=True, tokenize=False)
    assert rendered(TEMPLATES[name], TYPED) == expected
    assert rendered(TEMPLATES[name], JSON) == expected
    assert '"city": "Zürich"' in expected and "Wetter" in expected


def test_a_call_without_id_has_none_in_the_template() -> None:
    anonymous = ChatInput((BEFORE, ChatMessage("assistant", "", tool_calls=(ToolCall(0, "now", "{}"),))), tools=TOOLS)
    assert '{"name": "now", "arguments": {}}' in rendered(QWEN, anonymous)
    assert rendered("{{ messages[1].tool_calls | tojson }}", anonymous) == json.dumps(
        [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    )
    with pytest.raises(PhotonError, match="alphanumeric strings with length 9"):
        rendered(MISTRAL, anonymous)


def test_without_tools_a_template_gets_none() -> None:
    assert rendered("{{ tools is none }}", ChatInput((BEFORE,))) == "True"


def tools(*given: Tool, **others: Any) -> ChatInput:
    return ChatInput((BEFORE,), tools=given, **others)


REFUSED = [
    (tools(Tool("")), "chat.tools[0].name", "is '' with 0 characters"),
    (tools(Tool("a"), Tool("a b")), "chat.tools[1].name", "must be 1 to 64 of a-z"),
    (tools(Tool("a" * 65)), "chat.tools[0].name", "with 65 characters"),
    (tools(Tool("é")), "chat.tools[0].name", "must be 1 to 64 of"),
    (tools(Tool("a\n")), "chat.tools[0].name", "must be 1 to 64 of"),
    (tools(Tool("a"), Tool("b"), Tool("a")), "chat.tools[2].name", "another tool 'a'"),
    (tools(Tool("a"), tools_json="[]"), "chat.tools", "tools_json is set, too"),
]


@pytest.mark.parametrize(("chat", "field", "words"), REFUSED)
def test_wrong_tools_are_refused_by_name(chat: ChatInput, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        check_tools(chat)
    assert refused.value.field == field


def test_all_names_that_the_comment_allows() -> None:
    check_tools(tools(Tool("a" * 64), Tool("."), Tool("-_.09azAZ")))


def test_strict_arguments_need_a_choice() -> None:
    with pytest.raises(FeatureNotSupported, match="set tool_choice") as refused:
        check_tools(tools(Tool("a"), Tool("b", strict=True)))
    assert refused.value.field == "chat.tools[1].strict"
    check_tools(tools(Tool("a", strict=False), Tool("b")))
    check_tools(tools(Tool("b", strict=True), tool_choice=ToolChoice()))


def called(*calls: ToolCall, **others: Any) -> ChatInput:
    return ChatInput((BEFORE, ChatMessage("assistant", "", tool_calls=calls, **others)))


DEEP = '{"a":' * (MAX_JSON_DEPTH + 1) + "1" + "}" * (MAX_JSON_DEPTH + 1)
UNRENDERABLE = [
    (tools(Tool("a"), Tool("b", parameters_json="[]")), "chat.tools[1].parameters_json", "must be a JSON object"),
    (tools(Tool("a", parameters_json="null")), "chat.tools[0].parameters_json", "must be a JSON object"),
    (tools(Tool("a", parameters_json='{"type":')), "chat.tools[0].parameters_json", "not valid JSON"),
    (tools(Tool("a", parameters_json=DEEP)), "chat.tools[0].parameters_json", "nested at least 65 deep"),
    (called(CALL, tool_calls_json="[]"), "chat.messages[1].tool_calls", "tool_calls_json is set, too"),
    (called(CALL, ToolCall(1, "", "{}")), "chat.messages[1].tool_calls[1].name", "must not be empty"),
    (called(ToolCall(0, "a", "")), "chat.messages[1].tool_calls[0].arguments_json", "must be a JSON object; {}"),
    (called(ToolCall(0, "a", '"{}"')), "chat.messages[1].tool_calls[0].arguments_json", "must be a JSON object"),
    (called(ToolCall(0, "a", "{")), "chat.messages[1].tool_calls[0].arguments_json", "not valid JSON"),
]


@pytest.mark.parametrize(("chat", "field", "words"), UNRENDERABLE)
def test_wrong_json_is_refused_by_name(chat: ChatInput, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        rendered(QWEN, chat)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (tools(Tool("a", parameters_json="x" * MAX_JSON_BYTES), Tool("b", "y")), "chat.tools[1].description"),
        (tools(Tool("a", parameters_json="[" * MAX_JSON_NODES)), "chat.tools[0].parameters_json"),
        (
            called(CALL, ToolCall(1, "a", "x" * MAX_JSON_BYTES)),
            "chat.messages[1].tool_calls[1].arguments_json",
        ),
    ],
)
def test_all_json_counts_toward_one_limit(chat: ChatInput, field: str) -> None:
    with pytest.raises(InvalidRequest, match="are allowed") as refused:
        check_json(chat)
    assert refused.value.field == field


def test_tools_and_calls_count_for_what_a_thread_encodes() -> None:
    assert is_small(TYPED) and is_small(JSON)
    long = "x" * 9 * 1024
    for large in (
        tools(Tool("a", description=long)),
        tools(Tool("a", parameters_json=long)),
        called(ToolCall(0, "a", long)),
        called(ToolCall(0, "a" * 40_000, "{}")),
        called(ToolCall(0, "a", "{}", id="i" * 40_000)),
    ):
        assert not is_small(large)
