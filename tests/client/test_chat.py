"""Messages and tools of a chat in every form that callers have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from photon_grpc.client import ToolCall
from photon_grpc.client.options import build_request
from photon_grpc.errors import InvalidRequest
from photon_grpc.v1 import inference_pb2 as pb

USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string", "title": "Größe"}}}
CALL = pb.ToolCall(name="weather", arguments_json='{"city": "Ö"}', id="aZ09bcdef")


def sent(**message: Any) -> pb.ChatMessage:
    return build_request([USER, {"role": "assistant", **message}], {}).chat.messages[1]


@pytest.mark.parametrize(
    "call",
    [
        ToolCall(0, "weather", CALL.arguments_json, CALL.id),
        {"index": 0, "name": "weather", "arguments_json": CALL.arguments_json, "id": CALL.id},
        {"id": CALL.id, "type": "function", "function": {"name": "weather", "arguments": CALL.arguments_json}},
        {"id": CALL.id, "type": "function", "function": {"name": "weather", "arguments": {"city": "Ö"}}},
        {"id": CALL.id, "name": "weather", "arguments": {"city": "Ö"}},
        {"id": CALL.id, "name": "weather", "arguments": {"city": "Ö"}, "arguments_json": None},
        {"id": CALL.id, "name": "weather", "arguments": None, "arguments_json": CALL.arguments_json},
    ],
)
def test_a_call_goes_back_in_any_form(call: Any) -> None:
    for calls in ([call], (call,)):
        assert list(sent(content=None, tool_calls=calls).tool_calls) == [CALL]


def test_a_call_without_id_stays_without() -> None:
    for call in (ToolCall(0, "now", "{}"), {"id": None, "function": {"name": "now", "arguments": "{}"}}):
        assert list(sent(content="", tool_calls=[call]).tool_calls) == [pb.ToolCall(name="now", arguments_json="{}")]


def test_what_is_none_is_unset() -> None:
    unset = dict.fromkeys(("name", "tool_call_id", "tool_calls", "tool_calls_json", "parts"))
    assert sent(content="x", **unset) == pb.ChatMessage(role="assistant", content="x")


def test_content_may_be_in_parts() -> None:
    parts = [pb.ContentPart(text="a"), pb.ContentPart(text="b")]
    assert list(sent(content=[{"type": "text", "text": "a"}, {"text": "b"}]).parts) == parts
    assert list(sent(content=[{"text": "a"}, {"text": "b"}], parts=None).parts) == parts
    assert list(sent(parts=({"text": "a"}, {"type": "text", "text": "b"})).parts) == parts


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "weather", "description": "Rain?", "parameters": CITY, "strict": False},
        {"name": "weather", "description": "Rain?", "parameters_json": json.dumps(CITY), "strict": False},
        {"name": "weather", "description": "Rain?", "parameters": CITY, "parameters_json": None, "strict": False},
        {
            "type": "function",
            "function": {"name": "weather", "description": "Rain?", "parameters": CITY, "strict": False},
        },
        {"type": "function", "name": "weather", "description": "Rain?", "parameters": CITY, "strict": False},
    ],
)
def test_a_tool_in_any_form(tool: Any) -> None:
    (written,) = build_request([USER], {"tools": [tool]}).chat.tools
    assert (written.name, written.description, written.strict) == ("weather", "Rain?", False)
    assert json.loads(written.parameters_json) == CITY
    (least,) = build_request([USER], {"tools": ({"name": "now", "parameters": None},)}).chat.tools
    assert least == pb.Tool(name="now")


WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"content": None}, "content"),
    ({"content": "", "refusal": None}, "refusal"),
    ({"content": ["a"]}, "content[0]"),
    ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content[0].type"),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": 1}]}, "content[1].text"),
    ({"content": [{"type": "text"}]}, "content[0].text"),
    ({"content": "", "parts": "ab"}, "parts"),
    ({"content": [{"text": "a"}], "parts": [{"text": "b"}]}, "parts"),
    (
        {"content": "", "tool_calls": [{"name": "a", "arguments": {}, "arguments_json": "{}"}]},
        "tool_calls[0].arguments",
    ),
    ({"content": "", "tool_calls": {"name": "a"}}, "tool_calls"),
    ({"content": "", "tool_calls": ["a"]}, "tool_calls[0]"),
    ({"content": "", "tool_calls": [{"type": "custom"}]}, "tool_calls[0].type"),
    ({"content": "", "tool_calls": [{"function": "a"}]}, "tool_calls[0].function"),
    ({"content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}, "tool_calls[0].function.name"),
    ({"content": "", "tool_calls": [{"name": "a", "args": {}}]}, "tool_calls[0].args"),
    ({"content": "", "tool_calls": [{"name": "a", "arguments": [1]}]}, "tool_calls[0].arguments_json"),
    ({"content": "", "tool_calls": [{"name": "a", "arguments": {"x": float("nan")}}]}, "tool_calls[0].arguments"),
    ({"content": "", "tool_calls": [{"id": 5, "name": "a", "arguments": {}}]}, "tool_calls[0].id"),
]


@pytest.mark.parametrize(("message", "field"), WRONG_MESSAGES)
def test_a_wrong_message_is_refused_by_name(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sent(**message)
    assert refused.value.field == f"chat.messages[1].{field}"


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ({"name": "a"}, ""),
        ("[]", ""),
        (["a"], "[0]"),
        ([{"name": "a"}, {"description": "b"}], "[1].name"),
        ([{"type": "web_search"}], "[0].type"),
        ([{"name": "a", "input_schema": {}}], "[0].input_schema"),
        ([{"type": "function", "function": {"name": "a", "x": 1}}], "[0].function.x"),
        ([{"function": {"name": "a"}, "strict": True}], "[0].strict"),
        ([{"name": "a", "strict": "yes"}], "[0].strict"),
        ([{"name": "a", "parameters": [1]}], "[0].parameters_json"),
        ([{"name": "a", "parameters": {}, "parameters_json": "{}"}], "[0].parameters"),
        ([{"function": {"name": "a", "parameters": {}, "parameters_json": "{}"}}], "[0].function.parameters"),
        ([{"name": "a", "parameters": {"x": object()}}], "[0].parameters"),
    ],
)
def test_a_wrong_tool_is_refused_by_name(tools: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build_request([USER], {"tools": tools})
    assert refused.value.field == f"chat.tools{field}"
