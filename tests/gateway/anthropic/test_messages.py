"""Anthropic's official client against /v1/messages: the real server and front end, an engine with scripted texts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pydantic
import pytest

from photon_grpc import errors
from photon_grpc.core.request import FinishReason
from photon_grpc.gateway.anthropic.messages import FIELDS, PROMPT
from tests.frontend.answer_templates import DEEPSEEK, LLAMA3
from tests.frontend.tool_templates import HERMES, QWEN
from tests.gateway.talks import Line, Talk, talking
from tests.late import Late

anthropic = Late("anthropic")

HI: Any = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "weather", "description": "Rain?", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}},
]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nWhere? Zürich.\n</think>\n\n"


@pytest.fixture
async def server() -> AsyncIterator[Talk]:
    async with talking() as server:
        yield server


async def ask(server: Talk, says: Line | str = "Hello.", messages: Any = HI, **options: Any) -> Any:
    server.says(says)
    return await server.anthropic().messages.create(model="small", messages=messages, **({"max_tokens": 500} | options))


def plain(message: Any) -> list[dict[str, Any]]:
    """Return the blocks without ids and signatures."""
    return [
        {name: value for name, value in block.to_dict().items() if name not in ("id", "signature")}
        for block in message.content
    ]


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_a_message(server: Talk) -> None:
    # Older clients have them as parameters.
    sampling: Any = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    message = await ask(server, "Hello, Zürich 🙂.", system="Be brief.", extra_body=sampling)
    assert plain(message) == [{"type": "text", "text": "Hello, Zürich 🙂."}]
    assert (message.type, message.role, message.model) == ("message", "assistant", "small")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    request = server.link.adds[0].request
    assert message.usage.input_tokens == len(request.prompt_ids)
    assert {name: getattr(request.sampling, name) for name in sampling} == sampling
    assert request.stop.max_tokens == 500
    assert server.prompt() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("line", "options", "expected"),
    [
        (Line("so long", FinishReason.MAX_TOKENS), {}, ("max_tokens", None, "so long")),
        (Line("so long", FinishReason.CONTEXT_LENGTH), {}, ("model_context_window_exceeded", None, "so long")),
        (Line("a STOP b"), {"stop_sequences": ["STOP", "b"]}, ("stop_sequence", "STOP", "a ")),
    ],
)
async def test_why_a_message_ends(server: Talk, line: Line, options: Any, expected: Any) -> None:
    message = await ask(server, line, **options)
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == expected
    server.says(line)
    async with server.anthropic().messages.stream(model="", messages=HI, max_tokens=99, **options) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence, streamed.content[0].text) == expected


SAYS = f"{THOUGHT}One moment. {OSLO}\n{NOW}\n"
BLOCKS = [
    {"type": "thinking", "thinking": "\nWhere? Zürich.\n"},
    {"type": "text", "text": "\n\nOne moment. "},
    {"type": "tool_use", "name": "weather", "input": {"city": "Zürich 🙂"}},
    {"type": "tool_use", "name": "now", "input": {}},
]


async def test_a_stream_has_the_blocks_in_their_order(server: Talk) -> None:
    server.says(SAYS)
    kinds: list[str] = []
    async with server.anthropic().messages.stream(model="small", messages=HI, max_tokens=500, tools=TOOLS) as stream:
        async for event in stream:
            if not kinds or kinds[-1] != event.type:
                kinds.append(event.type)
        message = await stream.get_final_message()
    assert plain(message) == BLOCKS
    assert message.stop_reason == "tool_use"
    assert [block.id for block in message.content if block.type == "tool_use"] == list(
        dict.fromkeys(block.id for block in message.content if block.type == "tool_use")
    )
    assert message.content[0].type == "thinking" and message.content[0].signature
    request = server.link.adds[0].request
    assert message.usage.input_tokens == len(request.prompt_ids)
    assert message.usage.output_tokens == len(server.link.encode(SAYS))
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


async def test_a_whole_message_has_the_same_blocks(server: Talk) -> None:
    message = await ask(server, SAYS, tools=TOOLS)
    expected = [dict(block) for block in BLOCKS]
    # The texts around the calls are one.
    expected[1]["text"] += "\n\n"
    assert plain(message) == expected


async def test_white_space_beside_calls_is_no_text(server: Talk) -> None:
    for text in (f"\n\n{OSLO}\n{NOW}\n", f"{THOUGHT}{NOW}"):
        whole = await ask(server, text, tools=TOOLS)
        assert "text" not in [block.type for block in whole.content]
        server.says(text)
        async with server.anthropic().messages.stream(model="", messages=HI, max_tokens=500, tools=TOOLS) as stream:
            assert plain(await stream.get_final_message()) == plain(whole)
    assert plain(await ask(server, "\n\n")) == [{"type": "text", "text": "\n\n"}], "unless there is nothing else"


async def test_thinking_can_be_left_out_of_the_answer(server: Talk) -> None:
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    message = await ask(server, f"{THOUGHT}Yes.", thinking=thinking)
    assert plain(message) == [{"type": "thinking", "thinking": ""}, {"type": "text", "text": "\n\nYes."}]
    server.says(f"{THOUGHT}Yes.")
    async with server.anthropic().messages.stream(model="", messages=HI, max_tokens=99, thinking=thinking) as stream:
        assert plain(await stream.get_final_message()) == plain(message)


class Place(pydantic.BaseModel):
    city: str


async def test_an_answer_in_the_form_of_a_class(server: Talk) -> None:
    server.says('{"city": "Oslo"}')
    message = await server.anthropic().messages.parse(model="", messages=HI, max_tokens=999, output_format=Place)
    assert message.parsed_output == Place(city="Oslo")
    assert '"city"' in server.link.adds[0].request.constraint.grammar


async def test_a_client_that_blocks(server: Talk) -> None:
    def talk(url: str) -> tuple[str, str, int]:
        with anthropic.Anthropic(api_key="none", base_url=url, max_retries=0) as client:
            text = client.messages.create(model="small", messages=HI, max_tokens=999).content[0]
            with client.messages.stream(model="small", messages=HI, max_tokens=999) as stream:
                pieces = list(stream.text_stream)
        return text.text if text.type == "text" else "", "".join(pieces), len(pieces)

    server.says("Hello.", "Hello again.")
    whole, joined, num_pieces = await asyncio.to_thread(talk, server.made.url)
    assert (whole, joined) == ("Hello.", "Hello again.") and num_pieces > 1


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [QWEN, HERMES])
async def test_calls_and_their_results_go_back_in(template: str) -> None:
    async with talking(template) as server:
        messages: list[Any] = [{"role": "user", "content": "Umbrella?"}]
        asked = await ask(server, f"Let me see. {OSLO}{NOW}", messages, tools=TOOLS)
        calls = [block for block in asked.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "rain"}]},
            {"type": "tool_result", "tool_use_id": calls[1].id, "content": "broken", "is_error": True},
        ]
        messages += [
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": [*results, {"type": "text", "text": ""}, {"type": "text", "text": "Well?"}]},
        ]
        answer = await ask(server, "Yes.", messages, tools=TOOLS)
        assert (answer.content[0].text, answer.stop_reason) == ("Yes.", "end_turn")
        prompt = server.prompt()
        for text in (OSLO, NOW, "<tool_response>\nrain\n</tool_response>", "\nError: broken\n"):
            assert text in prompt
        assert prompt.endswith("<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n")


async def test_which_tools_must_be_called(server: Talk) -> None:
    async def grammar(choice: Any) -> str:
        await ask(server, NOW, tools=TOOLS, tool_choice=choice)
        constraint = server.link.adds[-1].request.constraint
        return "" if constraint is None else constraint.grammar

    either, one = await grammar({"type": "any"}), await grammar({"type": "tool", "name": "now"})
    assert "weather" in either and "now" in either
    assert "weather" not in one and "now" in one
    assert await grammar({"type": "auto"}) == "" and "weather" in server.prompt()
    assert await grammar({"type": "none"}) == "" and "weather" not in server.prompt()


async def test_calls_after_the_first_are_left_out_if_they_are_not_wanted(server: Talk) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    line = Line(f"{OSLO} Also: {NOW}", FinishReason.MAX_TOKENS)
    message = await ask(server, line, tools=TOOLS, tool_choice=choice)
    assert plain(message) == [BLOCKS[2]]
    server.says(line)
    options: Any = {"messages": HI, "max_tokens": 99, "tools": TOOLS, "tool_choice": choice}
    async with server.anthropic().messages.stream(model="", **options) as stream:
        streamed = await stream.get_final_message()
    assert plain(streamed) == [BLOCKS[2]] and streamed.stop_reason == message.stop_reason == "tool_use"


# --- what a body says ------------------------------------------------------------------------------------------------


async def test_blocks_of_one_speaker_are_one_message(server: Talk) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "no", "signature": "s"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
        {"role": "system", "content": [{"type": "text", "text": "f"}]},
        {"role": "user", "content": []},
    ]
    await ask(server, messages=messages)
    expected = [("user", "a\nb\nc"), ("assistant", "de"), ("system", "f"), ("user", "")]
    assert server.prompt() == (
        "".join([f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in expected]) + "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("thinking", "end"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, "assistant\n"),
        ({"type": "adaptive"}, "assistant\n"),
        ({"type": "disabled"}, "<think>\n\n</think>\n\n"),
    ],
)
async def test_thinking_is_a_variable_of_the_template(server: Talk, thinking: Any, end: str) -> None:
    await ask(server, thinking=thinking)
    assert server.prompt().endswith(end)


async def test_what_a_model_cannot_think_is_refused() -> None:
    async with talking(LLAMA3.replace("bos_token", "''")) as server:
        await ask(server, thinking={"type": "disabled"})
        await refused(server, "thinking.type", thinking={"type": "enabled", "budget_tokens": 1024})
    async with talking(DEEPSEEK) as server:
        await ask(server, thinking={"type": "enabled", "budget_tokens": 1024})
        await refused(server, "thinking.type", thinking={"type": "disabled"})


async def test_an_agents_body_is_understood(server: Talk) -> None:
    """Blocks, headers and fields as Claude Code sends them."""
    cached: Any = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f2e3;"},
        {"type": "text", "text": "You are an agent.", "cache_control": cached},
        {"type": "text", "text": "Be careful.", "cache_control": cached},
    ]
    tools = [{"name": f"mcp__server__tool_{n}", "input_schema": CITY} for n in range(150)]
    body: Any = {
        "system": system,
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u" * 256},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": ["claude-code-20250219", "context-management-2025-06-27"],
    }
    server.says("Hello.")
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": cached}]}]
    client = server.anthropic().beta.messages.with_raw_response
    response = await client.create(model="small", messages=messages, max_tokens=999, **body)  # type: ignore[arg-type]
    ignored = response.headers["x-photon-ignored"].split(", ")
    assert set(ignored) == {
        "system.x-anthropic-billing-header",
        "cache_control",
        "output_config.effort",
        "thinking.budget_tokens",
        "context_management",
        "anthropic-beta",
    }
    assert (await response.parse()).content[0].text == "Hello."  # type: ignore[union-attr]
    assert "billing" not in server.prompt() and "You are an agent.\nBe careful." in server.prompt()
    assert server.records[0].origin.labels == (("user", hashlib.sha256(b"u" * 256).hexdigest()),), "a label is short"
    assert server.link.adds[0].request.salt == hashlib.sha256(b"256:" + b"u" * 256).hexdigest()


async def test_tokens_are_counted_as_a_message_would_have_them(server: Talk) -> None:
    given: Any = {"messages": HI, "tools": TOOLS, "system": "Be brief.", "thinking": {"type": "disabled"}}
    counted = await server.anthropic().messages.count_tokens(model="small", **given)
    message = await ask(server, **given)
    assert counted.input_tokens == message.usage.input_tokens > 0
    history: Any = [*HI, {"role": "assistant", "content": "Hello"}]
    assert (await server.anthropic().messages.count_tokens(model="", messages=history)).input_tokens > 0


# --- errors ----------------------------------------------------------------------------------------------------------


async def refused(server: Talk, param: str, code: str = "FEATURE_NOT_SUPPORTED", **body: Any) -> Any:
    whole = {"model": "small", "messages": HI, "max_tokens": 99, **body}
    with pytest.raises(anthropic.BadRequestError) as error:
        await server.anthropic().post("/v1/messages", body=whole, cast_to=object)
    fields: Any = error.value.body
    assert fields["type"] == "error" and fields["request_id"] == error.value.response.headers["request-id"]
    assert fields["error"]["type"] == "invalid_request_error"
    assert (fields["error"]["param"], fields["error"]["code"]) == (param, code), body
    return fields


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": [*blocks]}]


DEEP: Any = json.loads('{"a":' * 70 + "{}" + "}" * 70)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": user({"type": "image", "source": {}})}, "messages[0].content[0]", "FEATURE_NOT_SUPPORTED"),
    (
        {"messages": [*HI, *user({"type": "text", "text": "a"}, {"type": "document"})]},
        "messages[1].content[1]",
        "FEATURE_NOT_SUPPORTED",
    ),
    (
        {"messages": user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})},
        "messages[0].content[0].content[0]",
        "FEATURE_NOT_SUPPORTED",
    ),
    ({"messages": user({"type": ["text"]})}, "messages[0].content[0]", "FEATURE_NOT_SUPPORTED"),
    ({"messages": user({"type": "tool_use"})}, "messages[0].content[0]", "INVALID_REQUEST"),
    ({"messages": user({"type": "text", "txt": "a"})}, "messages[0].content[0]", "INVALID_REQUEST"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "INVALID_REQUEST"),
    ({"messages": []}, "messages", "INVALID_REQUEST"),
    ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "messages[1]", "FEATURE_NOT_SUPPORTED"),
    (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": DEEP}]},
                *HI,
            ]
        },
        "messages[1].content[0].input",
        "INVALID_REQUEST",
    ),
    ({"system": [{"type": "image"}]}, "system[0]", "FEATURE_NOT_SUPPORTED"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "FEATURE_NOT_SUPPORTED"),
    ({"tools": [*TOOLS, {"name": "a b", "input_schema": {}}]}, "tools[2].name", "INVALID_REQUEST"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading", "FEATURE_NOT_SUPPORTED"),
    ({"tools": [{"name": "a", "input_schema": DEEP}]}, "tools[0].input_schema", "INVALID_REQUEST"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name", "INVALID_REQUEST"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "INVALID_REQUEST"),
    ({"max_tokens": None}, "max_tokens", "INVALID_REQUEST"),
    ({"max_tokens": 0}, "max_tokens", "INVALID_REQUEST"),
    ({"max_token": 1}, "max_token", "INVALID_REQUEST"),
    ({"top_p": 2}, "top_p", "INVALID_REQUEST"),
    ({"stop_sequences": [""]}, "stop_sequences[0]", "INVALID_REQUEST"),
    ({"container": "c"}, "container", "FEATURE_NOT_SUPPORTED"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]",
        "FEATURE_NOT_SUPPORTED",
    ),
]


async def test_what_is_not_supported_is_refused_by_its_place(server: Talk) -> None:
    for body, param, code in REFUSED:
        await refused(server, param, code, **body)
    assert not server.link.adds


async def test_errors_are_those_of_the_client(server: Talk) -> None:
    client = server.anthropic()
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="claude", messages=HI, max_tokens=99)
    assert missing.value.type == "not_found_error"  # type: ignore[attr-defined]
    with pytest.raises(anthropic.RequestTooLargeError):
        await client.messages.create(model="", messages=[{"role": "user", "content": "a" * (1 << 20)}], max_tokens=99)
    server.link.lose()
    with pytest.raises(anthropic.InternalServerError) as lost:
        await client.messages.create(model="", messages=HI, max_tokens=99)
    assert lost.value.status_code == 503 and lost.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def test_a_failure_after_output_began_is_an_event(server: Talk) -> None:
    server.says(Line("Hel", None))
    kinds: list[str] = []
    stream = await server.anthropic().messages.create(model="", messages=HI, max_tokens=99, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="engine") as lost:
        async for event in stream:
            kinds += [event.type]
    assert kinds[0] == "message_start" and "message_stop" not in kinds
    assert lost.value.body["error"]["code"] == "ENGINE_FAILURE"  # type: ignore[index]


async def test_an_operators_abort_is_no_end_of_a_message(server: Talk) -> None:
    line = Line("so lo", FinishReason.ABORTED)
    with pytest.raises(anthropic.ConflictError, match="ABORTED_BY_ADMIN"):
        await ask(server, line)
    server.says(line)
    texts: list[str] = []
    with pytest.raises(anthropic.APIStatusError, match="ABORTED_BY_ADMIN"):
        async with server.anthropic().messages.stream(model="", messages=HI, max_tokens=99) as stream:
            async for text in stream.text_stream:
                texts.append(text)  # noqa: PERF401
    assert "".join(texts) == "so lo"


async def test_clients_repeat_what_may_succeed_and_nothing_else(server: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "RETRY_AFTER_S", 0.01)
    facts = server.link.facts
    server.link.lose()
    server.says("Hello.")

    async def come_back(response: httpx2.Response) -> None:
        server.link.facts = facts
        server.link.on_frame(facts)

    client = server.anthropic(max_retries=1)
    client._client.event_hooks["response"].append(come_back)
    message = await client.messages.create(model="", messages=HI, max_tokens=99)
    assert message.content[0].text == "Hello."  # type: ignore[union-attr]
    statuses = [response.status_code for response in server.responses]
    assert statuses == [503, 200]
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(model="", messages=[], max_tokens=99)
    assert [response.status_code for response in server.responses].count(400) == 1


# --- the table -------------------------------------------------------------------------------------------------------


def keys_of(*params: Any) -> set[str]:
    return {name for each in params for name in each.__annotations__}


def test_the_table_has_every_field_of_the_client() -> None:
    # Here: it takes a second.
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta_params

    plain_params = (message_create_params.MessageCreateParamsBase, message_create_params.MessageCreateParamsStreaming)
    assert set(FIELDS) >= keys_of(*plain_params, beta_params.MessageCreateParamsBase)
    assert set(PROMPT) >= keys_of(message_count_tokens_params.MessageCountTokensParams)
