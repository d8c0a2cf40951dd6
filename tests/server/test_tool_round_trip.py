"""Tools out, calls back in: ids of calls through every method, and a whole conversation through gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import string
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import msgspec
import pytest

from photon_grpc.client import Delta, ToolCall
from photon_grpc.client.options import build_request
from photon_grpc.errors import FeatureNotSupported, InvalidConstraint, InvalidRequest, InvalidTemplate
from photon_grpc.frontend.output.call_ids import CallIds
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from tests.frontend.tool_templates import HERMES, MISTRAL, QWEN
from tests.server.failing import info_of
from tests.server.test_answers import CHAT, LONG_FACTS, Talker, talking

WITH_GRAMMARS = msgspec.structs.replace(LONG_FACTS, has_grammars=True)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Rain?", "parameters": CITY}},
    {"name": "now"},
]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SAYS = f"Let me see. {OSLO}\n{NOW}"


@pytest.fixture
async def qwen() -> AsyncIterator[Talker]:
    async with talking(QWEN) as talker:
        yield talker


def ids(calls: Sequence[ToolCall]) -> list[str]:
    return [call.id for call in calls]


def called(deltas: list[Delta], index: int = 0) -> list[str]:
    return ids([call for delta in deltas if delta.index == index for call in delta.tool_calls])


def made(talker: Talker, request_id: str, output: int = 0) -> list[str]:
    """Return the ids of the two calls of an output for the last prompt."""
    num_prompt = len(talker.link.adds[-1].request.prompt_ids)
    return [CallIds(request_id, output, num_prompt).of(index) for index in range(2)]


async def test_turns_of_a_conversation_under_one_request_id_have_different_ids(qwen: Talker) -> None:
    options: Any = {"tools": TOOLS, "request_id": "r-1"}
    first = await qwen.generate(SAYS, **options)
    longer = [*CHAT, {"role": "assistant", "content": "hm"}, {"role": "user", "content": "again"}]
    call = asyncio.create_task(qwen.client.generate(longer, **options))
    await qwen.answer(SAYS, len(qwen.link.adds))
    assert set(ids(first.tool_calls)).isdisjoint(ids((await call).tool_calls))


def test_an_id_is_nine_letters_and_digits_of_a_digest() -> None:
    number = int(hashlib.sha256(b"r-1\n7\n2\n3").hexdigest(), 16)
    expected = ""
    for _ in range(9):
        expected += (string.digits + string.ascii_letters)[number % 62]
        number //= 62
    assert CallIds("r-1", 2, 7).of(3) == expected
    drawn = {CallIds(f"r{n % 10}", n // 10 % 10, n // 1000).of(n // 100 % 10) for n in range(2000)}
    assert len(drawn) == 2000 and all(re.fullmatch(r"[0-9A-Za-z]{9}", each) for each in drawn)


async def test_every_method_gives_a_call_the_same_id(qwen: Talker) -> None:
    options: Any = {"tools": TOOLS, "request_id": "r-1"}
    for _ in range(2):
        first = ids((await qwen.generate(SAYS, **options)).tool_calls)
        expected = made(qwen, "r-1")
        assert first == expected
        assert called(await qwen.stream(SAYS, **options, max_tokens_per_message=5)) == expected
        assert called(await qwen.multiplex(SAYS, build_request(CHAT, options))) == expected
    several = (await qwen.generate(SAYS, num_outputs=2, **options)).outputs
    assert ids(several[0].tool_calls) == expected
    assert ids(several[1].tool_calls) == made(qwen, "r-1", 1)


async def test_an_id_that_the_server_assigns_counts_as_well(qwen: Talker) -> None:
    first, second = [await qwen.generate(SAYS, tools=TOOLS) for _ in range(2)]
    for result in (first, second):
        assert ids(result.tool_calls) == made(qwen, result.request_id)
    assert set(ids(first.tool_calls)).isdisjoint(ids(second.tool_calls))


async def test_a_continued_output_has_the_ids_of_the_whole(qwen: Talker) -> None:
    whole = await qwen.generate(SAYS, tools=TOOLS, request_id="r-1")
    tokens = qwen.ids(SAYS)
    for cut in range(1, len(tokens), 9):
        rest = await qwen.generate(SAYS, tools=TOOLS, request_id="r-1", continue_from=tokens[:cut])
        assert rest.tool_calls == whole.tool_calls[len(whole.tool_calls) - len(rest.tool_calls) :]


async def test_a_stream_that_the_client_resumes_keeps_its_ids(qwen: Talker) -> None:
    """The engine is lost in the middle of the second call."""
    link, tokens = qwen.link, qwen.ids(SAYS)
    cut = len(qwen.ids(SAYS[: SAYS.index(NOW) + 20]))
    stream = qwen.client.stream(CHAT, tools=TOOLS)
    reading = asyncio.create_task(read(stream))
    await link.added(1)
    for token in tokens[:cut]:
        link.step((link.adds[0].handle, token))
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)  # the client must have received some of it
    link.lose()
    link.facts = LONG_FACTS
    link.on_frame(LONG_FACTS)
    await qwen.answer(SAYS, 1)
    request_id = link.adds[0].request.request_id
    assert link.adds[1].request.request_id == request_id and link.adds[1].request.continued_ids
    assert called(await reading) == made(qwen, request_id)


async def read(stream: Any) -> list[Delta]:
    return [delta async for delta in stream]


@pytest.mark.parametrize("template", [QWEN, HERMES])
async def test_a_call_and_its_answer_go_back_in_as_they_came(template: str) -> None:
    async with talking(template) as talker:
        messages: list[Any] = [{"role": "user", "content": "Umbrella?"}]
        asked = await talker.generate(SAYS, messages, tools=TOOLS)
        assert [call.name for call in asked.tool_calls] == ["weather", "now"]
        messages.append({"role": "assistant", "content": asked.content.strip(), "tool_calls": asked.tool_calls})
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "ra"}, {"text": "in"}]}
            for call in asked.tool_calls
        ]
        answer = await talker.generate("Yes.", messages, tools=TOOLS)
        assert (answer.content, answer.tool_calls) == ("Yes.", ())
        prompt = talker.text(talker.link.adds[-1].request.prompt_ids)
        assert f"{OSLO}\n{NOW}<|im_end|>\n" in prompt and prompt.count("<tool_response>\nrain\n</tool_response>") == 2
        assert await talker.client.tokenize(messages, tools=TOOLS) == talker.link.adds[-1].request.prompt_ids
        for form in (in_openais_form(asked.tool_calls), [vars_of(call) for call in asked.tool_calls]):
            messages[1] = {**messages[1], "tool_calls": form}
            assert await talker.client.tokenize(messages, tools=TOOLS) == talker.link.adds[-1].request.prompt_ids


def in_openais_form(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
        for call in calls
    ]


def vars_of(call: ToolCall) -> dict[str, Any]:
    return {"index": call.index, "id": call.id, "name": call.name, "arguments_json": call.arguments_json}


async def test_ids_satisfy_the_template_that_is_strictest_about_them() -> None:
    async with talking("{%- set bos_token, eos_token = '<s>', '</s>' %}" + MISTRAL) as talker:
        call = ToolCall(0, "weather", '{"city": "Oslo"}', CallIds("r", 0, 1).of(0))
        messages = [
            {"role": "user", "content": "Umbrella?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        prompt = talker.text(await talker.client.tokenize(messages, tools=TOOLS))
        assert f'"id": "{call.id}"' in prompt and f'"call_id": "{call.id}"' in prompt
        messages[1]["tool_calls"] = [ToolCall(0, "weather", "{}", "call_1")]
        with pytest.raises(InvalidTemplate, match="length 9"):
            await talker.client.tokenize(messages, tools=TOOLS)


def tool(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"name": name, **fields}


NOT_OBEYED = {"properties": {"a": {"not": {}}}}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tools": [tool("a b")]}, InvalidRequest, "chat.tools[0].name"),
    ({"tools": [tool(), tool()]}, InvalidRequest, "chat.tools[1].name"),
    ({"tools": [tool(str(n)) for n in range(129)]}, InvalidRequest, "chat.tools"),
    ({"tools": [tool()], "tools_json": "[]"}, InvalidRequest, "chat.tools"),
    ({"tools": [tool(), tool("b", parameters_json="[]")]}, InvalidRequest, "chat.tools[1].parameters_json"),
    ({"tools": [tool(), tool("b", strict=True)]}, FeatureNotSupported, "chat.tools[1].strict"),
    ({"tools": [tool()], "tool_choice": "b"}, InvalidRequest, "chat.tool_choice.name"),
    (
        {"tools": [tool(), tool("b", parameters={"type": "array"})], "tool_choice": "b"},
        InvalidRequest,
        "chat.tools[1].parameters_json",
    ),
    (
        {"tools": [tool(), tool("b", parameters=NOT_OBEYED, strict=True)], "tool_choice": "required"},
        InvalidConstraint,
        "chat.tools[1].parameters_json",
    ),
    ({"tools": [], "tool_choice": "required"}, InvalidRequest, "chat.tool_choice"),
]


async def test_what_cannot_be_obeyed_is_refused_by_name(qwen: Talker) -> None:
    qwen.link.facts = WITH_GRAMMARS
    for options, error, field in REFUSED:
        with pytest.raises(error) as refused:
            await qwen.client.generate(CHAT, **options)
        assert refused.value.field == field, options  # type: ignore[attr-defined]
    assert not qwen.link.adds


async def test_arguments_follow_the_schema_unless_a_tool_is_not_strict(qwen: Talker) -> None:
    qwen.link.facts = WITH_GRAMMARS
    anything = [tool("b", parameters=NOT_OBEYED, strict=False)]
    await qwen.generate(NOW, tools=anything, tool_choice="required")
    grammar = json.loads(qwen.link.adds[-1].request.constraint.grammar)["grammars"][0]["lark_grammar"]
    assert '"type":"object"' in grammar and "not" not in grammar
    typed = await constraint_of(qwen, tools=TOOLS, tool_choice="required")
    written = json.dumps([{"name": "weather", "parameters": CITY}, {"name": "now"}])
    assert typed == await constraint_of(qwen, tools_json=written, tool_choice="required")


async def constraint_of(talker: Talker, **options: Any) -> Any:
    await talker.generate(NOW, **options)
    return talker.link.adds[-1].request.constraint


# --- parts -----------------------------------------------------------------------------------------------------------


def message(*parts: Any, **fields: Any) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role="user", parts=parts, **fields)


PICTURE = inference_pb2.Media(media_type="image/png", data=b"x")
TEXT = {"text": "a"}
WRONG_PARTS: list[tuple[list[inference_pb2.ChatMessage], str, str, str]] = [
    ([message(TEXT, content="b")], "INVALID_REQUEST", "chat.messages[0].parts", ""),
    ([message(TEXT), message(TEXT, {})], "INVALID_REQUEST", "chat.messages[1].parts[1]", ""),
    ([message(TEXT, {"image": PICTURE})], "FEATURE_NOT_SUPPORTED", "chat.messages[0].parts[1].image", "FEATURE_IMAGES"),
    ([message({"file": {}})], "FEATURE_NOT_SUPPORTED", "chat.messages[0].parts[0].file", "FEATURE_FILES"),
    ([message({"audio": {}})], "FEATURE_NOT_SUPPORTED", "chat.messages[0].parts[0].audio", "FEATURE_AUDIO"),
    ([message(*[TEXT] * 2049), message(*[TEXT] * 2048)], "INVALID_REQUEST", "chat.messages[1].parts", ""),
    (
        [inference_pb2.ChatMessage(role="assistant", tool_calls=[{"name": "a", "arguments_json": "{}"}] * 2049)],
        "INVALID_REQUEST",
        "chat.messages[0].tool_calls",
        "",
    ),
]


@pytest.mark.parametrize(("messages", "reason", "field", "feature"), WRONG_PARTS)
async def test_wrong_parts_are_refused_by_name(
    qwen: Talker, messages: list[Any], reason: str, field: str, feature: str
) -> None:
    chat = inference_pb2.ChatInput(messages=messages)
    async with grpc.aio.insecure_channel(qwen.client.target) as channel:
        inference, models = inference_pb2_grpc.InferenceServiceStub(channel), model_pb2_grpc.ModelServiceStub(channel)
        for call in (
            inference.Generate(inference_pb2.GenerateRequest(chat=chat)),
            models.Tokenize(model_pb2.TokenizeRequest(chat=chat)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            info = info_of(refused.value)
            assert (info.reason, info.metadata["field"], info.metadata["feature"]) == (reason, field, feature)


async def test_texts_of_parts_are_joined(qwen: Talker) -> None:
    plain = await qwen.client.tokenize([{"role": "user", "content": "ab\nc"}])
    parts = ["a", "", "b\n", "c"]
    for key in ("content", "parts"):
        given = [{"role": "user", key: [{"type": "text", "text": text} for text in parts]}]
        assert await qwen.client.tokenize(given) == plain  # type: ignore[arg-type]
