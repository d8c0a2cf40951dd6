"""Messages and responses of the embedded model: tools that must be called, constrained answers, the same text."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from photon_grpc import LLM, demo
from photon_grpc.gateway.app import application
from photon_grpc.gateway.calls.guard import HttpRules
from photon_grpc.observe.failure_log import FailureLog
from tests.frontend.tool_templates import QWEN
from tests.gateway.scripted import NoPages
from tests.late import Late

anthropic, openai = Late("anthropic"), Late("openai")

HI: Any = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = tmp_path_factory.mktemp("server") / "model"
    shutil.copytree(demo.TARGET, model, symlinks=True)
    (Path(model) / "chat_template.jinja").write_text(QWEN)
    with LLM(model, device="cpu", max_num_seqs=4, num_blocks=128) as llm:
        yield llm


def through(llm: LLM, talk: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Run `talk` beside the model, with the options of a client."""

    async def run() -> None:
        front = llm._program._frontend
        app = application(front, HttpRules(FailureLog()), NoPages(), max_body_bytes=1 << 20)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as client:
            await talk({"api_key": "none", "http_client": client, "max_retries": 0})

    llm._program.wait(run())


def test_messages(llm: LLM) -> None:
    (expected,) = llm.generate([HI], max_tokens=12, temperature=0)
    tools: Any = [{"name": "weather", "input_schema": CITY}]

    async def talk(options: dict[str, Any]) -> None:
        client = anthropic.AsyncAnthropic(base_url="http://localhost", **options)
        whole = await client.messages.create(model="model", messages=HI, max_tokens=12, extra_body={"temperature": 0})
        assert whole.content[0].text == expected.text  # type: ignore[union-attr]
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
        forced: Any = {"max_tokens": 100, "tools": tools, "tool_choice": {"type": "tool", "name": "weather"}}
        async with client.messages.stream(model="model", messages=HI, **forced) as stream:
            asked = await stream.get_final_message()
        (call,) = asked.content
        assert call.type == "tool_use" and call.input["city"] in ("Oslo", "Rome")
        assert asked.stop_reason == "tool_use"
        answered = [
            *HI,
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
        ]
        await client.messages.create(model="model", messages=answered, max_tokens=5, tools=tools)

    through(llm, talk)


def test_responses(llm: LLM) -> None:
    (expected,) = llm.generate([HI], max_tokens=12, temperature=0)
    tools: Any = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]

    async def talk(options: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", **options)
        whole = await client.responses.create(model="model", input="hi", max_output_tokens=12, temperature=0)
        assert whole.output_text == expected.text and whole.status == "incomplete"
        forced: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        asked = await client.responses.parse(model="model", input="hi", max_output_tokens=200, **forced)
        (call,) = asked.output
        assert call.type == "function_call" and call.parsed_arguments["city"] in ("Oslo", "Rome")
        items: Any = [*HI, call, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        await client.responses.create(
            model="model", input=items, max_output_tokens=5, tools=[tools[0] | {"strict": None}]
        )

    through(llm, talk)
