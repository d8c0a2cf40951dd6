"""Reasoning and tool calls through gRPC, with the real front end and wire and an engine with scripted texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import pytest

from photon_grpc.client import Client, Delta, Generation, ToolCall
from photon_grpc.client.generation import read_delta
from photon_grpc.client.options import build_request
from photon_grpc.config.flags import ServerConfig
from photon_grpc.frontend.constraints import constraint
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.server.server import Server
from photon_grpc.server.wire.features import ABSENT, Feature
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.answer_templates import DEEPSEEK, LLAMA3, QWEN3
from tests.frontend.fake_engine import FACTS, FakeLink, done, frontend, served
from tests.frontend.test_chat import LLAMA3 as PLAIN_TEMPLATE

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂", "days": [1, {"at": "}"}]}}\n</tool_call>'
WEATHER = ToolCall(0, "weather", '{"city": "Zürich 🙂", "days": [1, {"at": "}"}]}')


def unnamed(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Return the calls without their ids, which requests without an id of their own draw at random."""
    return tuple(replace(call, id="") for call in calls)


LONG_FACTS = msgspec.structs.replace(FACTS, max_model_len=4096, num_blocks=512)


class Talker:
    """A client, and the text that its engine answers to every request, one token per step."""

    def __init__(self, client: Client, front: Frontend, link: FakeLink) -> None:
        self.client = client
        self._front = front
        self.link = link

    def ids(self, text: str) -> tuple[int, ...]:
        tokenizer = self._front._model.tokenizer
        assert tokenizer is not None
        return tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)

    async def generate(self, says: str, prompt: Any = CHAT, **options: Any) -> Generation:
        return (await asyncio.gather(self.client.generate(prompt, **options), self._say(says)))[0]

    async def stream(self, says: str, prompt: Any = CHAT, **options: Any) -> list[Delta]:
        async def read() -> list[Delta]:
            return [delta async for delta in self.client.stream(prompt, **options)]

        return (await asyncio.gather(read(), self._say(says)))[0]

    async def multiplex(self, says: str, request: pb.GenerateRequest) -> list[Delta]:
        async def read() -> list[Delta]:
            async with grpc.aio.insecure_channel(self.client.target) as channel:
                action = pb.MultiplexGenerateRequest(generate=request)
                call = inference_pb2_grpc.InferenceServiceStub(channel).MultiplexGenerate(iter([action]))
                return [
                    read_delta(each) async for frame in call for item in frame.items for each in item.response.deltas
                ]

        return (await asyncio.gather(read(), self._say(says)))[0]

    def text(self, ids: Sequence[int]) -> str:
        tokenizer = self._front._model.tokenizer
        assert tokenizer is not None
        return tokenizer.decode(ids, skip_special_tokens=False)

    async def _say(self, text: str) -> None:
        await self.answer(text, len(self.link.adds))

    async def answer(self, text: str, number: int) -> None:
        """Say `text`, or what is left of it, to the request of this number."""
        link = self.link
        await link.added(number + 1)
        first, request = link.adds[-1].handle, link.adds[-1].request
        handles = range(first, first + request.num_outputs)
        for id in self.ids(text)[len(request.continued_ids) :]:
            link.step(*[(handle, id) for handle in handles])
            await asyncio.sleep(0)
        link.step(finished=tuple([done(handle) for handle in handles]))


@asynccontextmanager
async def talking(template: str, **changes: Any) -> AsyncIterator[Talker]:
    with frontend(served("byte_level", template=template, **changes), link=FakeLink(LONG_FACTS)) as (front, link):
        server = Server(front, config=ServerConfig())
        (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
        async with Client(address) as client:
            yield Talker(client, front, link)
        await server.drain_and_stop(0)


@pytest.fixture
async def qwen() -> AsyncIterator[Talker]:
    async with talking(QWEN3) as talker:
        yield talker


def joined(deltas: list[Delta], name: str, index: int = 0) -> str:
    return "".join(getattr(delta, name) for delta in deltas if delta.index == index)


ANSWER = f"<think>\nWhere? Zürich.\n</think>\n\nOne moment. {CALL}\n<tool_call>no</tool_call>"


async def test_an_answer_in_one_message(qwen: Talker) -> None:
    result = await qwen.generate(ANSWER, tools_json=TOOLS)
    assert result.text == ANSWER
    assert result.reasoning == "\nWhere? Zürich.\n"
    assert result.content == "\n\nOne moment. \n<tool_call>no</tool_call>"
    assert unnamed(result.tool_calls) == (WEATHER,)


async def test_an_answer_as_it_is_written(qwen: Talker) -> None:
    deltas = await qwen.stream(ANSWER, tools_json=TOOLS, num_outputs=2)
    for index in (0, 1):
        assert joined(deltas, "text", index) == ANSWER
        assert joined(deltas, "reasoning", index) == "\nWhere? Zürich.\n"
        assert joined(deltas, "content", index) == "\n\nOne moment. \n<tool_call>no</tool_call>"
        mine = [delta for delta in deltas if delta.index == index]
        (called,) = [number for number, delta in enumerate(mine) if delta.tool_calls]
        assert unnamed(mine[called].tool_calls) == (WEATHER,)
        assert "</tool_call>" not in joined(mine[:called], "text", index)
        assert "</tool_call>" in joined(mine[: called + 1], "text", index), "with the text that completes it"


async def test_an_answer_on_a_shared_stream(qwen: Talker) -> None:
    deltas = await qwen.multiplex(ANSWER, build_request(CHAT, {"request_id": "a", "tools_json": TOOLS}))
    assert joined(deltas, "text") == ANSWER
    assert joined(deltas, "reasoning") == "\nWhere? Zürich.\n"
    assert joined(deltas, "content") == "\n\nOne moment. \n<tool_call>no</tool_call>"
    assert [each for delta in deltas for each in unnamed(delta.tool_calls)] == [WEATHER]


@pytest.mark.parametrize("interval", [{"max_tokens_per_message": 7}, {"max_tokens_per_message": 50}])
async def test_the_split_into_messages_does_not_matter(qwen: Talker, interval: dict[str, Any]) -> None:
    deltas = await qwen.stream(ANSWER, tools_json=TOOLS, **interval)
    assert joined(deltas, "content") == "\n\nOne moment. \n<tool_call>no</tool_call>"
    assert [each for delta in deltas for each in unnamed(delta.tool_calls)] == [WEATHER]


async def test_a_call_that_was_cut_completes(qwen: Talker) -> None:
    ids = qwen.ids(ANSWER)
    for cut in range(1, len(ids), 9):
        prefix = ids[:cut]
        before = await qwen.generate(ANSWER, tools_json=TOOLS, max_tokens=500)
        rest = await qwen.generate(ANSWER, tools_json=TOOLS, continue_from=prefix)
        assert before.reasoning.endswith(rest.reasoning)
        assert before.content.endswith(rest.content)
        is_called = "</tool_call>" in ANSWER[: len(ANSWER) - len(rest.text)]
        assert unnamed(rest.tool_calls) == (() if is_called else unnamed(before.tool_calls)), f"cut after {cut} tokens"


async def test_text_cut_by_a_stop_string_belongs_to_no_part(qwen: Talker) -> None:
    result = await qwen.generate("<think>a STOP b", stop_strings=["STOP"])
    assert (result.text, result.reasoning, result.content) == ("<think>a ", "a ", "")
    closed = await qwen.generate(CALL, stop_strings=["</tool_call>"], tools_json=TOOLS)
    assert (closed.finish.reason, unnamed(closed.tool_calls)) == ("STOP_STRING", (WEATHER,))
    assert "</tool_call>" not in closed.text


async def test_only_chats_with_text_have_parts(qwen: Talker) -> None:
    for prompt, options in (("hi", {}), ([65, 66], {}), (CHAT, {"text": False, "token_ids": True})):
        result = await qwen.generate(ANSWER, prompt, **options)
        assert (result.reasoning, result.content, result.tool_calls) == ("", "", ())
    untooled = await qwen.generate(ANSWER)
    assert (untooled.tool_calls, untooled.content.count("<tool_call>")) == ((), 2)


async def test_a_prompt_that_closes_the_reasoning_leaves_content(qwen: Talker) -> None:
    result = await qwen.generate("Yes.", template_args_json='{"enable_thinking": false}')
    assert (result.reasoning, result.content) == ("", "Yes.")


async def test_a_prompt_that_opens_the_reasoning() -> None:
    async with talking(DEEPSEEK) as talker:
        sly = [{"role": "user", "content": "<think>"}]
        deltas = await talker.stream("So.</think>Yes.", sly)
        assert (joined(deltas, "reasoning"), joined(deltas, "content")) == ("So.", "Yes.")
        unprompted = await talker.generate("Yes.", [{"role": "user", "content": "a"}], add_generation_prompt=False)
        assert (unprompted.reasoning, unprompted.content) == ("", "Yes.")
        assert (await talker.client.model()).features[:3] == ("TEXT", "CHAT", "REASONING")


async def test_bare_objects_are_calls_if_the_template_says_so() -> None:
    says = '{"name": "weather", "parameters": {"city": "Zürich", "days": {"n": 1}}}<|eot_id|>'
    async with talking(LLAMA3) as talker:
        result = await talker.generate(says, tools_json=TOOLS)
        assert (result.content, result.reasoning) == ("", "")
        assert unnamed(result.tool_calls) == (ToolCall(0, "weather", '{"city": "Zürich", "days": {"n": 1}}'),)
        assert (await talker.generate(says)).content == says.removesuffix("<|eot_id|>")
        assert (await talker.client.model()).features[:3] == ("TEXT", "CHAT", "TOOL_CALLS")


async def test_a_model_without_marks_has_no_parts() -> None:
    async with talking(PLAIN_TEMPLATE) as talker:
        result = await talker.generate(ANSWER, tools_json=TOOLS)
        assert (result.text, result.reasoning, result.content, result.tool_calls) == (ANSWER, "", "", ())
        features = (await talker.client.model()).features
        assert "REASONING" not in features and "TOOL_CALLS" not in features


async def test_scores_leave_room_for_text_and_parts() -> None:
    lengths = []
    for template in (QWEN3, PLAIN_TEMPLATE):
        async with talking(template, max_message_bytes=40_000) as talker:
            await talker.generate("yes", logprobs=0)
            lengths.append(talker.link.adds[-1].request.stop.max_tokens)
    assert lengths[0] * 3 == pytest.approx(lengths[1] * 2, abs=3), "a score, the text, and perhaps its parts"


async def test_features_list_reasoning_and_tool_calls(qwen: Talker) -> None:
    assert (await qwen.client.model()).features[:4] == ("TEXT", "CHAT", "REASONING", "TOOL_CALLS")


async def test_a_model_with_all_features_lacks_those_documented_as_absent(qwen: Talker) -> None:
    offered = {*(await qwen.client.model()).features, *constraint.FEATURES.values()}
    absent = {name.removeprefix("Feature.FEATURE_") for name in ABSENT if name.startswith("Feature.")}
    # The fake engine does not draft.
    offered |= {"SPECULATION"}
    assert offered | absent == {name.removeprefix("FEATURE_") for name in Feature.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert not offered & absent
