"""OpenAI's official client against /v1/responses: the real server and front end, an engine with scripted texts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import response_create_params

from photon_grpc.core.request import FinishReason
from photon_grpc.gateway.openai.responses import FIELDS
from tests.frontend.tool_templates import QWEN
from tests.gateway.talks import Line, Talk, talking

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Rain?", "parameters": CITY, "strict": None},
    {"type": "function", "name": "now", "parameters": None, "strict": False},
]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SAYS = f"<think>\nWhere?\n</think>\n\nOne moment. {OSLO}\n{NOW}"


@pytest.fixture
async def server() -> AsyncIterator[Talk]:
    async with talking() as server:
        yield server


async def ask(server: Talk, says: Line | str = "Hello.", input: Any = "hi", **options: Any) -> Any:
    server.says(says)
    return await server.openai().responses.create(model="small", input=input, **options)


def plain(response: Any) -> list[tuple[str, str]]:
    """Return the type and the text of every item."""
    return [
        (item.type, item.arguments if item.type == "function_call" else "".join(part.text for part in item.content))
        for item in response.output
    ]


async def test_a_response(server: Talk) -> None:
    response = await ask(server, "Hello.", instructions="Be brief.", temperature=0.5, max_output_tokens=50, user="ann")
    assert (response.output_text, response.status, response.model) == ("Hello.", "completed", "small")
    assert (response.object, response.error, response.incomplete_details) == ("response", None, None)
    assert (response.instructions, response.temperature, response.max_output_tokens) == ("Be brief.", 0.5, 50)
    request = server.link.adds[0].request
    assert (request.sampling.temperature, request.stop.max_tokens) == (0.5, 50)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        len(request.prompt_ids),
        response.usage.total_tokens - len(request.prompt_ids),
    )
    assert server.records[0].origin.labels == (("user", "ann"),) and "ann" in request.salt
    assert server.prompt() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


ITEMS = [
    ("reasoning", "\nWhere?\n"),
    ("message", "\n\nOne moment. "),
    ("function_call", '{"city": "Zürich 🙂"}'),
    ("function_call", "{}"),
]


async def test_a_stream_has_the_items_in_their_order(server: Talk) -> None:
    server.says(SAYS)
    events = []
    async with server.openai().responses.stream(model="small", input="hi", tools=TOOLS) as stream:
        async for event in stream:
            events.append(event)  # noqa: PERF401
        response = await stream.get_final_response()
    assert plain(response) == ITEMS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(texts) > 1 and "".join(texts) == ITEMS[1][1]
    (done,) = [event.text for event in events if event.type == "response.output_text.done"]
    assert done == ITEMS[1][1]
    assert response.usage is not None and response.usage.input_tokens == len(server.link.adds[0].request.prompt_ids)


async def test_a_whole_response_has_the_same_items(server: Talk) -> None:
    response = await ask(server, SAYS, tools=TOOLS)
    assert plain(response) == [ITEMS[0], ("message", "\n\nOne moment. \n"), *ITEMS[2:]]


async def test_an_output_that_was_cut_is_incomplete(server: Talk) -> None:
    line = Line("so long", FinishReason.MAX_TOKENS)
    whole = await ask(server, line)
    server.says(line)
    async with server.openai().responses.stream(model="small", input="hi") as stream:
        kinds = [event.type async for event in stream]
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete"
    assert kinds[-1] == "response.incomplete"


class Place(pydantic.BaseModel):
    city: str


async def test_an_answer_in_the_form_of_a_class(server: Talk) -> None:
    server.says('{"city": "Oslo"}', '{"city": "Oslo"}', "{}")
    client = server.openai()
    response = await client.responses.parse(model="", input="hi", text_format=Place)
    assert response.output_parsed == Place(city="Oslo")
    assert '"city"' in server.link.adds[0].request.constraint.grammar
    async with client.responses.stream(model="", input="hi", text_format=Place) as stream:
        assert (await stream.get_final_response()).output_parsed == Place(city="Oslo")
    await client.responses.create(model="", input="hi", text={"format": {"type": "json_object"}})
    assert server.link.adds[2].request.constraint is not None


async def test_calls_and_their_outputs_go_back_in() -> None:
    async with talking(QWEN) as server:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Umbrella?"}]}]
        asked = await ask(server, f"Let me see. {OSLO}{NOW}", items, tools=TOOLS)
        calls = [item for item in asked.output if item.type == "function_call"]
        items += asked.output
        items += [
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"},
            {
                "type": "function_call_output",
                "call_id": calls[1].call_id,
                "output": [{"type": "input_text", "text": "6"}],
            },
        ]
        answer = await ask(server, "Yes.", items, tools=TOOLS)
        assert answer.output_text == "Yes."
        prompt = server.prompt()
        assert f"<|im_start|>assistant\nLet me see. \n{OSLO}\n{NOW}<|im_end|>" in prompt
        for text in ("<tool_response>\nrain\n</tool_response>", "<tool_response>\n6\n</tool_response>"):
            assert text in prompt


async def test_which_tools_must_be_called(server: Talk) -> None:
    async def grammar(choice: Any) -> str:
        await ask(server, NOW, tools=TOOLS, tool_choice=choice)
        constraint = server.link.adds[-1].request.constraint
        return "" if constraint is None else constraint.grammar

    either, one = await grammar("required"), await grammar({"type": "function", "name": "now"})
    assert "weather" in either and "weather" not in one and "now" in one
    assert await grammar("auto") == "" and "weather" in server.prompt()
    assert await grammar("none") == "" and "weather" not in server.prompt()
    single = await ask(server, f"{NOW} Also: {OSLO}", tools=TOOLS, parallel_tool_calls=False)
    assert ("function_call", '{"city": "Zürich 🙂"}') not in plain(single) and ("function_call", "{}") in plain(single)


async def test_what_has_no_effect_is_named(server: Talk) -> None:
    server.says("Hello.")
    response = await server.openai().responses.with_raw_response.create(
        model="",
        input=[
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ],
        store=True,
        metadata={"a": "b"},
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        truncation="disabled",
    )
    named = response.headers["x-photon-ignored"].split(", ")
    assert set(named) == {"store", "metadata", "reasoning.effort", "reasoning.summary", "include"}
    assert server.prompt().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    template = "{{ messages[0].content }}{% if add_generation_prompt %}{{ reasoning_effort }}{% endif %}"
    async with talking(template) as other:
        await ask(other, reasoning={"effort": "low"})
        assert other.prompt() == "hilow"


async def test_an_answer_that_comes_back_may_have_all_its_fields(server: Talk) -> None:
    text = {"type": "output_text", "text": "Hello.", "annotations": [{"type": "file_path"}], "logprobs": [{}]}
    said = {"type": "message", "role": "assistant", "content": [text], "id": "msg_1", "status": "completed"}
    await ask(server, input=[{"role": "user", "content": "hi"}, said | {"phase": "commentary"}])
    assert "<|im_start|>assistant\nHello.<|im_end|>" in server.prompt()
    named = set(server.responses[-1].headers["x-photon-ignored"].split(", "))
    parts = {f"input[].content[].{name}" for name in ("annotations", "logprobs")}
    assert named == {"input[].id", "input[].status", "input[].phase"} | parts


async def test_what_a_response_repeats_is_bounded(server: Talk) -> None:
    assert (await ask(server, tools=TOOLS, tool_choice="none")).tools == []
    assert [tool.name for tool in (await ask(server, tools=TOOLS)).tools] == ["weather", "now"]
    long: Any = [{**TOOLS[0], "description": "d" * (64 << 10)}]
    async with talking(max_model_len=1 << 18, num_blocks=1 << 15, max_queued_tokens=1 << 18) as roomy:
        cut = await ask(roomy, tools=long, instructions="Be brief.", user="u" * 512)
        assert (cut.tools, cut.instructions, cut.user) == ([], "Be brief.", "u" * 512)
        cut = await ask(roomy, tools=TOOLS, reasoning={"effort": "e" * (64 << 10)})
        assert cut.reasoning.effort is None and "d" * (64 << 10) in roomy.prompt(0)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "FEATURE_NOT_SUPPORTED"),
    ({"conversation": "c"}, "conversation", "FEATURE_NOT_SUPPORTED"),
    ({"background": True}, "background", "FEATURE_NOT_SUPPORTED"),
    ({"truncation": "auto"}, "truncation", "FEATURE_NOT_SUPPORTED"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]", "FEATURE_NOT_SUPPORTED"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "FEATURE_NOT_SUPPORTED"),
    ({"tools": [{**TOOLS[0], "name": ""}]}, "tools[0].name", "INVALID_REQUEST"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "FEATURE_NOT_SUPPORTED"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
        "input[0].content[0]",
        "FEATURE_NOT_SUPPORTED",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "[]"}]},
        "input[0].arguments",
        "INVALID_REQUEST",
    ),
    ({"input": []}, "input", "INVALID_REQUEST"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "FEATURE_NOT_SUPPORTED"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "INVALID_REQUEST"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "INVALID_REQUEST"),
    ({"user": "u" * 513}, "user", "INVALID_REQUEST"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name", "INVALID_REQUEST"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": 1}}, "tool_choice.name", "INVALID_REQUEST"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "a", "b": 1}}, "tool_choice", "INVALID_REQUEST"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "FEATURE_NOT_SUPPORTED"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "txt": "lost"}]}]},
        "input[0].content[0].txt",
        "INVALID_REQUEST",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "INVALID_REQUEST",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": None}]}]},
        "input[0].output[0].text",
        "INVALID_REQUEST",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens", "INVALID_REQUEST"),
    ({"max_tokens": 1}, "max_tokens", "INVALID_REQUEST"),
]


async def test_what_is_not_supported_is_refused_by_its_place(server: Talk) -> None:
    for body, param, code in REFUSED:
        with pytest.raises(openai.BadRequestError) as error:
            await server.openai().post("/responses", body={"model": "small", "input": "hi", **body}, cast_to=object)
        assert (error.value.param, error.value.code) == (param, code), body
    assert not server.link.adds


async def test_a_failure_after_output_began_is_an_event(server: Talk) -> None:
    server.says(Line("Hel", None))
    numbers: list[int] = []
    stream = await server.openai().responses.create(model="", input="hi", stream=True)
    with pytest.raises(openai.APIError, match="engine") as lost:
        async for event in stream:
            numbers += [event.sequence_number]
    assert numbers == list(range(len(numbers))) and len(numbers) > 2
    assert lost.value.code == "ENGINE_FAILURE"


async def test_an_operators_abort_is_no_end_of_a_response(server: Talk) -> None:
    line = Line("so lo", FinishReason.ABORTED)
    with pytest.raises(openai.ConflictError) as aborted:
        await ask(server, line)
    assert aborted.value.code == "ABORTED_BY_ADMIN"
    kinds: list[str] = []
    with pytest.raises(openai.APIError) as cut:
        async for event in await ask(server, line, stream=True):
            kinds += [event.type]
    assert cut.value.code == "ABORTED_BY_ADMIN" and "response.output_text.delta" in kinds
    assert not {"response.completed", "response.incomplete"} & set(kinds)


def test_the_table_has_every_field_of_the_client() -> None:
    params = (response_create_params.ResponseCreateParamsBase, response_create_params.ResponseCreateParamsStreaming)
    assert set(FIELDS) >= {name for each in params for name in each.__annotations__}
