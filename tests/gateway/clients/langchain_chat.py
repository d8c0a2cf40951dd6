"""LangChain's ChatOpenAI at an HTTP server: langchain_chat.py BASE_URL MODEL. Ends with 0 if all answers are right."""

from __future__ import annotations

import asyncio
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

MESSAGES = [("system", "Be brief."), ("user", "Is it raining in Oslo?")]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)
    rain: bool


def main(base_url: str, name: str) -> None:
    options = {"model": name, "base_url": f"{base_url}/v1", "api_key": "none", "max_retries": 0}
    model = ChatOpenAI(**options, temperature=0, max_tokens=60)
    invokes(model)
    streams(model)
    calls_tools(model)
    reads_structures(model)
    completes(OpenAI(**options, temperature=0, max_tokens=8))
    print("all answers are right")


def invokes(model: ChatOpenAI) -> None:
    answer = model.invoke(MESSAGES)
    assert isinstance(answer.content, str) and answer.content
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert asyncio.run(model.ainvoke(MESSAGES)).content == answer.content
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    assert len(scored.response_metadata["logprobs"]["content"]) > 0
    assert len(model.batch([MESSAGES, MESSAGES])) == 2


def streams(model: ChatOpenAI) -> None:
    whole = model.invoke(MESSAGES).content
    for streaming in (model, ChatOpenAI(**{**_copied(model), "stream_usage": True})):
        chunks = list(streaming.stream(MESSAGES))
        gathered = chunks[0]
        for chunk in chunks[1:]:
            gathered += chunk
        assert gathered.content == whole
    assert gathered.usage_metadata is not None and gathered.usage_metadata["output_tokens"] > 0


def _copied(model: ChatOpenAI) -> dict[str, object]:
    names = ("model_name", "openai_api_base", "openai_api_key", "temperature", "max_tokens")
    return {name: getattr(model, name) for name in names}


def calls_tools(model: ChatOpenAI) -> None:
    """A forced call, in one answer and streamed, whose result goes back in."""
    for choice in ("any", "Weather"):
        asked = model.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False).invoke(MESSAGES)
        (call,) = asked.tool_calls
        assert call["name"] == "Weather" and Weather(**call["args"])
        assert asked.response_metadata["finish_reason"] == "tool_calls"
    chunks = list(model.bind_tools([Weather], tool_choice="Weather").stream(MESSAGES))
    gathered = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk
    assert [each["args"] for each in gathered.tool_calls] == [call["args"]]
    turns = [HumanMessage("Rain?"), asked, ToolMessage("no", tool_call_id=str(call["id"]))]
    assert model.bind_tools([Weather]).invoke(turns).content is not None


def reads_structures(model: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Weather, method=method)
        assert isinstance(structured.invoke(MESSAGES), Weather)
        assert isinstance(list(structured.stream(MESSAGES))[-1], Weather)
    strict = model.with_structured_output(Weather, method="json_schema", strict=True, include_raw=True).invoke(MESSAGES)
    assert isinstance(strict["parsed"], Weather)
    # Any object is JSON, also one that is no Weather.
    raw = model.with_structured_output(Weather, method="json_mode", include_raw=True).invoke(MESSAGES)
    assert raw["raw"].content.lstrip().startswith("{")


def completes(model: OpenAI) -> None:
    text = model.invoke("def fib(n):")
    assert text and "".join(model.stream("def fib(n):")) == text


main(*sys.argv[1:])
