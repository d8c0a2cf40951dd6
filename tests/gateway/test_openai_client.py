"""OpenAI's own Python client at the HTTP server: answers, streams, tools, structured outputs, exception classes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pydantic
import pytest

from photon_grpc.core.request import FinishReason
from photon_grpc.errors import DeadlineUnreachable, EngineFailure, NumericFailure, QueueFull
from tests.frontend.answer_templates import QWEN3
from tests.frontend.tool_templates import QWEN
from tests.gateway.scripted import Scripted, scripted
from tests.late import Late
from tests.server.keys import SECRETS, write_keys

if TYPE_CHECKING:
    import openai
else:
    openai = Late("openai")

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Rain?", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NEVER = httpx2.Timeout(60)


@pytest.fixture
async def plain() -> AsyncIterator[Scripted]:
    async with scripted() as made:
        yield made


@pytest.fixture
async def qwen() -> AsyncIterator[Scripted]:
    async with scripted(QWEN, has_grammars=True) as made:
        yield made


def client(made: Scripted, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{made.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": NEVER, **options}
    )


async def chat(made: Scripted, messages: Any = MESSAGES, **options: Any) -> Any:
    async with client(made) as calls:
        return await calls.chat.completions.create(model="small", messages=messages, **options)


async def chunks_of(made: Scripted, messages: Any = MESSAGES, **options: Any) -> list[Any]:
    async with client(made) as calls:
        stream = await calls.chat.completions.create(model="small", messages=messages, stream=True, **options)
        return [chunk async for chunk in stream]


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_a_chat_has_the_fields_of_openais_answer(plain: Scripted) -> None:
    answer = await chat(plain, max_completion_tokens=50)
    assert type(answer).model_validate(answer.model_dump()) == answer  # every field has the type that its class states
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello!", "stop")
    num_prompt = len(plain.link.adds[0].request.prompt_ids)
    num_output = len(plain.link.encode("Hello!"))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_output)
    assert usage.total_tokens == num_prompt + num_output
    assert answer.object == "chat.completion" and answer.model == "small" and answer.system_fingerprint
    assert answer.created > 1_700_000_000


@pytest.mark.parametrize("reason", [FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH, FinishReason.TIME_LIMIT])
async def test_an_answer_that_was_cut_ends_with_length(plain: Scripted, reason: FinishReason) -> None:
    plain.link.reason = reason
    assert (await chat(plain)).choices[0].finish_reason == "length"
    assert (await chunks_of(plain))[-1].choices[0].finish_reason == "length"


async def test_chunks_join_to_the_answer_and_end_with_the_usage(plain: Scripted) -> None:
    chunks = await chunks_of(plain, stream_options={"include_usage": True}, n=2)
    *others, last = chunks
    for index in range(2):
        deltas = [choice.delta for chunk in others for choice in chunk.choices if choice.index == index]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == "Hello!"
    assert last.choices == [] and last.usage.completion_tokens == 2 * len(plain.link.encode("Hello!"))
    # OpenAI writes "usage": null in the others.
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in others)
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert all("usage" not in chunk.model_fields_set for chunk in await chunks_of(plain))


async def test_usage_comes_with_every_chunk_if_vllms_option_asks_for_it(plain: Scripted) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in await chunks_of(plain, stream_options=options)]
    assert counts == sorted(counts) and counts[-1] == len(plain.link.encode("Hello!"))
    async with client(plain) as calls:
        stream = await calls.completions.create(model="small", prompt="a", stream=True, stream_options=options)  # type: ignore[call-overload]
        assert all([chunk.usage is not None async for chunk in stream])


async def test_the_helper_for_streams_gathers_the_answer(plain: Scripted) -> None:
    async with client(plain) as calls, calls.chat.completions.stream(model="small", messages=MESSAGES) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello!" and final.choices[0].finish_reason == "stop"
    assert kinds[-1] == "content.done" and "content.delta" in kinds


async def test_the_synchronous_client(plain: Scripted) -> None:
    def talk() -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as calls:
            answer = calls.chat.completions.create(model="small", messages=MESSAGES)
            stream = calls.chat.completions.create(model="small", messages=MESSAGES, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return answer.choices[0].message.content or "", streamed, [model.id for model in calls.models.list()]

    assert await asyncio.to_thread(talk) == ("Hello!", "Hello!", ["small", "alias"])


async def test_models_by_name(plain: Scripted) -> None:
    async with client(plain) as calls:
        assert [model.id async for model in await calls.models.list()] == ["small", "alias"]
        assert (await calls.models.retrieve("alias")).id == "alias"
        with pytest.raises(openai.NotFoundError):
            await calls.models.retrieve("none")


async def test_completions_of_several_prompts_come_in_order(plain: Scripted) -> None:
    plain.link.texts = ["one", "two", "three"]
    async with client(plain) as calls:
        answer = await calls.completions.create(model="small", prompt=["a", "b"], n=2)
        assert [(each.index, each.text) for each in answer.choices] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
        stream = await calls.completions.create(model="small", prompt=[[5, 6], [7]], n=2, stream=True, echo=True)
        texts = dict.fromkeys(range(4), "")
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    first, second = [plain.prompt(number) for number in (-2, -1)]
    assert texts == {0: f"{first}three", 1: f"{first}three", 2: f"{second}three", 3: f"{second}three"}
    assert plain.link.adds[-1].request.prompt_ids == (7,)


async def test_a_signed_seed_is_a_seed_and_vllms_minus_one_is_none(plain: Scripted) -> None:
    for seed in (-2, -(2**63), 5):
        await chat(plain, seed=seed)
        assert plain.link.adds[-1].request.sampling.seed == seed % 2**64
    await chat(plain, seed=-1)
    assert plain.link.adds[-1].request.sampling.seed != 2**64 - 1


# --- tools -----------------------------------------------------------------------------------------------------------


async def test_a_call_goes_out_and_its_result_comes_back_in(qwen: Scripted) -> None:
    qwen.link.texts = [f"Let me see. {OSLO}\n{NOW}", "Rain."]
    asked = await chat(qwen, tools=TOOLS)
    (choice,) = asked.choices
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content.strip() == "Let me see."
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("now", {}),
    ]
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    # As a client has it: the object itself, or its dump with nulls and index.
    dumped = choice.message.model_dump()
    for index, call in enumerate(dumped["tool_calls"]):
        call["index"] = index
    for message in (choice.message, dumped):
        answer = await chat(qwen, [*MESSAGES, message, *answers], tools=TOOLS)
        assert answer.choices[0].message.content == "Rain." and answer.choices[0].finish_reason == "stop"
        assert f"{OSLO}\n{NOW}<|im_end|>" in qwen.prompt()
        assert qwen.prompt().count("<tool_response>\nrain\n</tool_response>") == 2


async def test_calls_in_a_stream(qwen: Scripted) -> None:
    qwen.link.texts = [f"Let me see. {OSLO}\n{NOW}"]
    async with (
        client(qwen) as calls,
        calls.chat.completions.stream(model="small", messages=MESSAGES, tools=TOOLS) as stream,
    ):
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["weather", "now"]
    last = (await chunks_of(qwen, tools=TOOLS))[-1]
    assert last.choices[0].finish_reason == "tool_calls"


async def test_a_call_without_words_has_no_content(qwen: Scripted) -> None:
    qwen.link.texts = [OSLO]
    message = (await chat(qwen, tools=TOOLS)).choices[0].message
    assert message.content is None and len(message.tool_calls) == 1


def grammar(made: Scripted) -> str:
    constraint = made.link.adds[-1].request.constraint
    assert constraint is not None
    return json.loads(constraint.grammar)["grammars"][0]["lark_grammar"]


async def test_required_calls_are_one_without_parallel_calls(qwen: Scripted) -> None:
    qwen.link.texts = [OSLO]
    await chat(qwen, tools=TOOLS, tool_choice="required")
    several = grammar(qwen)
    await chat(qwen, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    one = grammar(qwen)
    assert several.startswith('start: call ("\\n" call)*\n')
    assert one == several.replace(' ("\\n" call)*', "", 1)
    await chat(qwen, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert grammar(qwen).startswith("start: call\n") and "weather" not in grammar(qwen)
    await chat(qwen, tools=TOOLS, tool_choice="none")
    assert qwen.link.adds[-1].request.constraint is None and "weather" not in qwen.prompt()


async def test_reasoning_stands_beside_the_content() -> None:
    async with scripted(QWEN3) as made:
        made.link.texts = ["<think>\nHm.\n</think>\n\nYes."]
        message = (await chat(made)).choices[0].message
        assert (message.reasoning_content.strip(), message.content.strip()) == ("Hm.", "Yes.")
        deltas = [chunk.choices[0].delta for chunk in await chunks_of(made)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == "Hm."
        assert "".join(delta.content or "" for delta in deltas).strip() == "Yes."
        async with client(made) as calls:
            again = [*MESSAGES, message.model_dump(), *MESSAGES]
            raw = await calls.chat.completions.with_raw_response.create(model="small", messages=again)
        assert raw.headers["x-photon-ignored"] == "messages[].reasoning_content"


# --- messages --------------------------------------------------------------------------------------------------------


async def test_every_role_and_parts_of_text(plain: Scripted) -> None:
    messages = [
        {"role": "developer", "content": "be kind", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": "no", "annotations": [], "audio": None, "tool_calls": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]},
        {"role": "user", "content": "c"},
    ]
    await chat(plain, messages)
    assert plain.prompt() == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
        "<|im_start|>assistant\nnever<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TEXT = {"type": "text", "text": "a"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, "FEATURE_NOT_SUPPORTED", "messages[0].content[1]"),
    ({"messages": [{"role": "user", "content": [{**TEXT, "x": 1}]}]}, "INVALID_REQUEST", "messages[0].content[0].x"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "INVALID_REQUEST", "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "text": "a"}]}, "INVALID_REQUEST", "messages[0]"),
    ({"messages": []}, "INVALID_REQUEST", "messages"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]}]},
        "FEATURE_NOT_SUPPORTED",
        "messages[0].tool_calls[0].type",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "FEATURE_NOT_SUPPORTED", "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "INVALID_REQUEST", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "FEATURE_NOT_SUPPORTED", "tool_choice.type"),
    ({"tools": TOOLS, "parallel_tool_calls": False}, "FEATURE_NOT_SUPPORTED", "parallel_tool_calls"),
    ({"tool_choice": "required"}, "INVALID_REQUEST", "tool_choice"),
    ({"top_logprobs": 3}, "INVALID_REQUEST", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "INVALID_REQUEST", "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "INVALID_REQUEST", "stream_options"),
    ({"n": 0}, "INVALID_REQUEST", "n"),
    ({"max_tokens": 0}, "INVALID_REQUEST", "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "INVALID_REQUEST", "max_tokens"),
    ({"extra_body": {"session_id": "a", "prompt_cache_key": "b"}}, "INVALID_REQUEST", "prompt_cache_key"),
    ({"extra_body": {"allowed_token_ids": [1 << 20]}}, "INVALID_REQUEST", "allowed_token_ids[0]"),
    ({"temperature": "hot"}, "INVALID_REQUEST", "temperature"),
    ({"stop": [""]}, "INVALID_REQUEST", "stop[0]"),
    ({"logit_bias": {"x": 1}}, "INVALID_REQUEST", 'logit_bias["x"]'),
    ({"response_format": {"type": "xml"}}, "INVALID_REQUEST", "response_format.type"),
    ({"audio": {"voice": "a", "format": "mp3"}}, "FEATURE_NOT_SUPPORTED", "audio"),
    ({"moderation": {"model": "m"}}, "FEATURE_NOT_SUPPORTED", "moderation"),
    ({"extra_body": {"tempurature": 1}}, "INVALID_REQUEST", "tempurature"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "INVALID_CONSTRAINT",
        "response_format",
    ),
    ({"extra_body": {"guided_regex": "("}}, "INVALID_CONSTRAINT", "guided_regex"),
    ({"extra_body": {"guided_choice": []}}, "INVALID_REQUEST", "guided_choice"),
    ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "INVALID_REQUEST", "guided_choice"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "INVALID_CONSTRAINT", "structured_outputs.regex"),
]


async def test_what_is_not_supported_is_refused_by_its_name(qwen: Scripted) -> None:
    for options, code, param in REFUSED:
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(qwen, **options)
        error = refused.value
        assert (error.code, error.param, error.type) == (code, param, "invalid_request_error"), options
        assert all(each not in str(error) for each in ("chat.", "structured_output.", "$")), options
    assert not qwen.link.adds


async def test_fields_without_effect_are_named_in_a_header(plain: Scripted) -> None:
    options: Any = {"store": True, "metadata": {"a": "b"}, "reasoning_effort": "low", "service_tier": "auto"}
    async with client(plain) as calls:
        raw = await calls.chat.completions.with_raw_response.create(model="small", messages=MESSAGES, **options)
    assert set(raw.headers["x-photon-ignored"].split(", ")) == set(options)


# --- structured outputs ----------------------------------------------------------------------------------------------


class Event(pydantic.BaseModel):
    name: str
    days: list[int]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own class
async def test_pydantic_models_are_schemas_and_answers(qwen: Scripted) -> None:
    qwen.link.texts = ['{"name": "Fair", "days": [1, 2]}']
    async with client(qwen) as calls:
        parsed = await calls.chat.completions.parse(model="small", messages=MESSAGES, response_format=Event)
        message = parsed.choices[0].message
        assert message.parsed == Event(name="Fair", days=[1, 2])
        # The message goes back in as it is.
        await calls.chat.completions.create(model="small", messages=[*MESSAGES, message, *MESSAGES])  # type: ignore[list-item]
        async with calls.chat.completions.stream(model="small", messages=MESSAGES, response_format=Event) as stream:
            assert (await stream.get_final_completion()).choices[0].message.parsed == message.parsed
    constraint = qwen.link.adds[0].request.constraint
    assert constraint is not None and '"days"' in constraint.grammar


async def test_pydantic_tools_are_called(qwen: Scripted) -> None:
    qwen.link.texts = ['<tool_call>\n{"name": "Event", "arguments": {"name": "Fair", "days": []}}\n</tool_call>']
    async with client(qwen) as calls:
        parsed = await calls.chat.completions.parse(
            model="small", messages=MESSAGES, tools=[openai.pydantic_function_tool(Event)], tool_choice="required"
        )
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Event(name="Fair", days=[])


async def test_strict_tools_that_the_model_may_leave_out_are_named(qwen: Scripted) -> None:
    """No schema constrains their calls. The client's library sets `strict` on every tool that it makes."""
    tools = [openai.pydantic_function_tool(Event)]
    async with client(qwen) as calls:
        raw = await calls.chat.completions.with_raw_response.create(model="small", messages=MESSAGES, tools=tools)
        assert raw.headers["x-photon-ignored"] == "tools[].strict"
        forced = await calls.chat.completions.with_raw_response.create(
            model="small", messages=MESSAGES, tools=tools, tool_choice="required"
        )
        assert "x-photon-ignored" not in forced.headers


# --- errors, retries, deadlines --------------------------------------------------------------------------------------


async def test_errors_are_the_clients_own_classes(plain: Scripted, tmp_path: Path) -> None:
    async with client(plain) as calls:
        with pytest.raises(openai.NotFoundError) as lost:
            await calls.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert lost.value.code == "MODEL_NOT_FOUND" and lost.value.param == "model"
        with pytest.raises(openai.BadRequestError) as long:
            await calls.completions.create(model="small", prompt=[1] * 5000)
        assert (long.value.code, long.value.param) == ("PROMPT_TOO_LONG", "prompt")
        with pytest.raises(openai.NotFoundError):
            await calls.embeddings.create(model="small", input="a", encoding_format="float")
    async with scripted(keys=write_keys(tmp_path / "keys.toml")) as made:
        with pytest.raises(openai.AuthenticationError):
            await chat(made)
        async with client(made, api_key=SECRETS["mod"]) as calls:
            assert await calls.models.list()
            with pytest.raises(openai.PermissionDeniedError) as forbidden:
                await calls.chat.completions.create(model="small", messages=MESSAGES)
        assert forbidden.value.code == "SCOPE_REQUIRED"


class Counted(httpx2.AsyncHTTPTransport):
    """A transport that counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: list[int] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        self.statuses.append(response.status_code)
        return response


async def attempts(made: Scripted, **options: Any) -> tuple[list[int], openai.APIStatusError]:
    """Return the statuses of all attempts of a call that fails, and its error."""
    transport = Counted()
    async with client(made, max_retries=2, http_client=httpx2.AsyncClient(transport=transport)) as calls:
        with pytest.raises(openai.APIStatusError) as failed:
            await calls.chat.completions.create(model="small", messages=MESSAGES, **options)
    return transport.statuses, failed.value


async def test_the_client_repeats_only_what_may_succeed(plain: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(delay_s: float, *args: Any) -> None:
        delays_s.append(delay_s)

    delays_s: list[float] = []
    monkeypatch.setattr("openai._base_client.anyio.sleep", at_once)
    plain.link.fails_with, plain.link.texts = NumericFailure("not a number"), [""]
    statuses, error = await attempts(plain)
    assert statuses == [500] and error.code == "NUMERIC_FAILURE" and isinstance(error, openai.InternalServerError)
    assert error.response.headers["x-should-retry"] == "false" and "retry-after" not in error.response.headers
    plain.link.fails_with = QueueFull("the queue is full")
    statuses, error = await attempts(plain)
    assert statuses == [429] * 3 and isinstance(error, openai.RateLimitError) and error.code == "QUEUE_FULL"
    plain.link.lose()
    statuses, error = await attempts(plain)
    assert statuses == [503] * 3 and error.code == "ENGINE_RESTARTING"
    assert float(error.response.headers["retry-after-ms"]) / 1000 in delays_s


async def test_a_failure_after_output_began_ends_the_stream_without_done(plain: Scripted) -> None:
    plain.link.fails_with = EngineFailure("the device is gone")
    async with client(plain) as calls:
        stream = await calls.chat.completions.create(model="small", messages=MESSAGES, stream=True)
        text = ""
        with pytest.raises(openai.APIError) as failed:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert text and failed.value.code == "ENGINE_FAILURE"
    async with httpx2.AsyncClient() as http:
        body = {"messages": MESSAGES, "stream": True}
        answer = await http.post(f"{plain.url}/v1/chat/completions", json=body)
    *_, last = answer.text.strip().split("\n\n")
    assert answer.status_code == 200 and "[DONE]" not in answer.text
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "ENGINE_FAILURE"


async def test_a_stream_that_fails_before_output_has_its_own_status(plain: Scripted) -> None:
    plain.link.fails_with, plain.link.texts = NumericFailure("not a number"), [""]
    with pytest.raises(openai.InternalServerError):
        await chunks_of(plain)


async def test_whoever_leaves_aborts_the_request(plain: Scripted) -> None:
    plain.link.halts_after = 1
    async with client(plain) as calls:
        # A stream that is closed, a task that is cancelled, and a client that is out of patience.
        async with await calls.chat.completions.create(model="small", messages=MESSAGES, stream=True) as stream:
            await anext(aiter(stream))
        await gone(plain)
        task = asyncio.create_task(calls.chat.completions.create(model="small", messages=MESSAGES))
        await plain.link.added(2)
        task.cancel()
        await gone(plain)
        with pytest.raises(openai.APITimeoutError):
            await calls.completions.create(model="small", prompt=["a", "b"], timeout=0.2)
        await gone(plain)
    assert plain.link.aborted == [add.handle for add in plain.link.adds] and len(plain.link.adds) == 4


async def gone(made: Scripted) -> None:
    """Wait until nothing runs."""
    async with asyncio.timeout(30):
        # A client that closed a stream resets the connection when more arrives.
        while made.front.num_streams or len(made.link.aborted) < len(made.link.adds):
            made.link.step(*[(add.handle, 40) for add in made.link.adds if add.handle not in made.link.aborted])
            await asyncio.sleep(0.01)


async def test_deadlines_come_in_headers(plain: Scripted) -> None:
    plain.link.halts_after, plain.link.texts = 0, [""]
    async with client(plain) as calls:
        for options in ({}, {"stream": True}):
            with pytest.raises(openai.InternalServerError) as late:
                await calls.chat.completions.create(
                    model="small", messages=MESSAGES, extra_headers={"x-request-timeout-ms": "200"}, **options
                )
            assert late.value.status_code == 504 and late.value.code == "DEADLINE_PASSED"
            assert late.value.response.headers["x-should-retry"] == "false"
        await gone(plain)
        plain.link.halts_after, plain.link.fails_with = None, DeadlineUnreachable("there is not enough time")
        with pytest.raises(openai.InternalServerError) as refused:
            await calls.chat.completions.create(model="small", messages=MESSAGES, stream=True)
        assert (refused.value.status_code, refused.value.code) == (504, "DEADLINE_UNREACHABLE")
        for header in ("x-request-timeout-ms", "x-llm-d-slo-ttft-ms"):
            with pytest.raises(openai.BadRequestError) as wrong:
                await calls.chat.completions.create(model="small", messages=MESSAGES, extra_headers={header: "1.5"})
            assert wrong.value.param == header
        plain.link.fails_with, before_s = None, time.monotonic()
        await calls.chat.completions.create(
            model="small", messages=MESSAGES, extra_headers={"x-llm-d-slo-ttft-ms": "1500"}
        )
    deadline_s = plain.link.adds[-1].request.queue_deadline_s
    assert deadline_s is not None and before_s + 1.5 <= deadline_s <= time.monotonic() + 1.5


async def test_request_ids_go_in_and_out(plain: Scripted) -> None:
    async with client(plain) as calls:
        answer = await calls.chat.completions.create(
            model="small", messages=MESSAGES, extra_headers={"x-request-id": "mine-1"}
        )
        assert (answer._request_id, answer.id) == ("mine-1", "chatcmpl-mine-1")
        assert plain.link.adds[-1].request.request_id == "mine-1"
        assert (await calls.models.list())._request_id
        longest = {"x-request-id": "x" * 128}
        two = await calls.completions.create(model="small", prompt=["a", "b"], extra_headers=longest)
        assert two.id == f"cmpl-{longest['x-request-id']}"
        assert len({add.request.request_id for add in plain.link.adds[-2:]}) == 2
        with pytest.raises(openai.NotFoundError) as lost:
            await calls.models.retrieve("none", extra_headers={"x-request-id": "mine-2"})
    assert lost.value.request_id == "mine-2"


# --- tokens ----------------------------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize_as_vllm(plain: Scripted) -> None:
    async with httpx2.AsyncClient(base_url=plain.url) as http:
        made = (await http.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})).json()
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert made["token_strs"][0] == "<|begin_of_text|>" and "".join(made["token_strs"][1:]) == "hi"
        assert made["max_model_len"] == 4096
        bare = (await http.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})).json()
        assert bare["tokens"] == made["tokens"][1:] and "token_strs" not in bare
        text = (await http.post("/detokenize", json={"tokens": made["tokens"]})).json()
        assert text == {"prompt": "<|begin_of_text|>hi"}
        chat_ids = (await http.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"]
        wrong = await http.post("/tokenize", json={"messages": MESSAGES, "add_special_tokens": True})
        assert wrong.json()["error"]["param"] == "add_special_tokens"
        for body in ({}, {"tokens": None}, {"tokens": [1 << 20]}, {"tokens": [-1]}):
            wrong = await http.post("/detokenize", json=body)
            assert wrong.status_code == 400 and wrong.json()["error"]["param"].partition("[")[0] == "tokens", body
        assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    await chat(plain)
    assert plain.link.adds[-1].request.prompt_ids == tuple(chat_ids)
