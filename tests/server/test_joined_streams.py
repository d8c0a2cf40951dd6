"""The joined deltas of a stream are Generate's outputs, over gRPC, with everything that an output may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import msgspec
import pytest

from photon_grpc import __version__
from photon_grpc.client import Client
from photon_grpc.client.joined_outputs import joined_outputs
from photon_grpc.client.options import build_request
from photon_grpc.core.frames import Add, Down
from photon_grpc.core.logprobs import RECORD
from photon_grpc.core.request import FinishReason
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.answer_templates import QWEN3
from tests.frontend.fake_engine import FACTS, FakeLink, done, frontend, served
from tests.server.described import file, message, serialized
from tests.server.fake_frontend import serving

MODEL = served("byte_level", template=QWEN3)
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
ANSWER = f"<think>\nWhere? Zürich.\n</think>\n\nOne moment. {CALL}\n{CALL} ﷺ"
JSON = '{"a":17}'


def ids(text: str) -> tuple[int, ...]:
    assert MODEL.tokenizer is not None
    return MODEL.tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)


class Engine(FakeLink):
    """An engine that answers every output with the ids of `text`, one token per step, and EOS."""

    def __init__(self) -> None:
        super().__init__(msgspec.structs.replace(FACTS, max_model_len=4096, num_blocks=512, has_grammars=True))
        self.text = ANSWER
        self._playing: set[asyncio.Task[None]] = set()

    def send(self, frame: Down) -> None:
        super().send(frame)
        if isinstance(frame, Add):
            self._playing.add(asyncio.create_task(self._play(frame)))

    async def _play(self, add: Add) -> None:
        handles = range(add.handle, add.handle + add.request.num_outputs)
        num_records = add.request.logprobs.num_records
        for at, id in enumerate((*ids(self.text), MODEL.eos_token_ids[0])):
            records = b"".join(RECORD.pack(id, -at / 8, rank) for rank in range(1, num_records + 1))
            self.step(*[(handle, id) for handle in handles], scores=dict.fromkeys(handles, records))
            await asyncio.sleep(0.0005 if at % 7 else 0)  # several tokens in some messages
        self.step(finished=tuple([done(handle, FinishReason.EOS) for handle in handles]))


@pytest.fixture
async def served_by() -> AsyncIterator[tuple[Engine, str]]:
    engine = Engine()
    with frontend(MODEL, link=engine) as (front, _):
        async with serving(front) as address:  # type: ignore[arg-type]
            yield engine, address


def chat() -> pb.GenerateRequest:
    options = {"tools_json": TOOLS, "logprobs": 2, "token_ids": True, "num_outputs": 2, "request_id": "r"}
    return build_request([{"role": "user", "content": "hi"}], options)


def typed() -> pb.GenerateRequest:
    described = file()
    message(described, "Counted", "a: int32")
    request = build_request("hi", {"request_id": "r", "token_ids": True})
    request.structured_output.protobuf.file_descriptor_set = serialized(described)
    request.structured_output.protobuf.message_type = "acme.Counted"
    return request


@pytest.mark.parametrize(("request_of", "text"), [(chat, ANSWER), (typed, JSON)])
async def test_joined_deltas_are_the_outputs(served_by: tuple[Engine, str], request_of: object, text: str) -> None:
    engine, address = served_by
    engine.text, request = text, request_of()  # type: ignore[operator]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        whole = await stub.Generate(request)
        messages = [each async for each in stub.StreamGenerate(request)]
    outputs = list(whole.outputs)
    assert joined_outputs(delta for each in messages for delta in each.deltas) == outputs
    assert len(messages) > 2
    has = {field.name for output in outputs for field, _ in output.ListFields()}
    if request.HasField("chat"):
        assert has >= {"text", "token_ids", "scores", "reasoning", "content", "tool_calls", "finish", "usage"}
    else:
        assert has >= {"text", "token_ids", "message", "finish", "usage"}
    assert [output.usage.output_tokens for output in outputs] == [len(output.token_ids) for output in outputs]
    assert sum(output.usage.output_tokens for output in outputs) == whole.usage.output_tokens
    assert whole.release == messages[0].start.release == __version__
    assert whole.HasField("create_time") and messages[0].start.HasField("create_time")


async def test_the_client_has_the_same_from_every_method(served_by: tuple[Engine, str]) -> None:
    _, address = served_by
    options = {"tools_json": TOOLS, "num_outputs": 2, "request_id": "r", "seed": 1}
    prompt = [{"role": "user", "content": "hi"}]
    async with Client(address) as client, client.multiplex() as many:
        one = await client.generate(prompt, **options)
        other = await many.generate(prompt, **options)
        deltas = [delta async for delta in client.stream(prompt, **options)]
    assert one.outputs == other.outputs
    num_tokens = len(ids(ANSWER)) + 1
    assert [output.usage.output_tokens for output in one.outputs] == [num_tokens] * 2
    assert [delta.usage.output_tokens for delta in deltas if delta.usage is not None] == [num_tokens] * 2
    assert one.release == other.release == __version__
    assert 0 < one.create_time_s <= other.create_time_s
