"""Answers as objects of the caller's class, and the errors if there is none."""

from __future__ import annotations

from dataclasses import dataclass

import pydantic
import pytest

from photon_grpc.client import Client, MessageMismatch, SyncClient
from photon_grpc.errors import InvalidRequest
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2

from .fake_server import FakeServer, message, serving, serving_in_a_thread

EOS, MAX_TOKENS, COMPLETE = pb.FINISH_REASON_EOS, pb.FINISH_REASON_MAX_TOKENS, pb.FINISH_REASON_CONSTRAINT_COMPLETE


@dataclass
class Invoice:
    number: int
    paid: bool = False


class Bill(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, number: int) -> int:
        if number % 2:
            raise ValueError("odd numbers are others'")
        return number


async def test_a_whole_answer_is_an_object() -> None:
    script = [message('{"number":17}', finish=COMPLETE)]
    async with serving(FakeServer(script)) as fake, Client(fake.target) as client:
        found = await client.generate("x", json_schema=Invoice)
        plain = await client.generate("x", json_schema={"type": "object"})
    assert found.parsed == Invoice(17)
    assert plain.parsed is None
    sent = fake.requests[0].structured_output.json_schema
    assert '"required": ["number"]' in sent
    assert fake.requests[1].structured_output.json_schema == '{"type": "object"}'


async def test_a_stream_has_the_object_at_its_end_each_output_its_own() -> None:
    first = message('{"number":', start=True)
    first.deltas.add(index=1, text='{"nu')
    second = message("17}", finish=EOS)
    other = second.deltas.add(index=1, text='mber":18}')
    other.finish.reason = EOS
    async with serving(FakeServer([first, second])) as fake, Client(fake.target) as client:
        deltas = [delta async for delta in client.stream("x", json_schema=Invoice, num_outputs=2)]
    assert [delta.parsed for delta in deltas] == [None, None, Invoice(17), Invoice(18)]


async def test_an_answer_that_was_cut_off_says_so_and_keeps_its_text() -> None:
    script = [message('{"number":1', start=True, finish=MAX_TOKENS)]
    async with serving(FakeServer(script)) as fake, Client(fake.target) as client:
        found = await client.generate("x", json_schema=Invoice)
        (last,) = [delta async for delta in client.stream("x", json_schema=Invoice)]
    for cut in (found, found.outputs[0], last):
        assert cut.text == '{"number":1'
        with pytest.raises(MessageMismatch, match="ended by MAX_TOKENS before its Invoice was whole") as refused:
            _ = cut.parsed
        assert (refused.value.text, refused.value.finish_reason) == ('{"number":1', "MAX_TOKENS")


async def test_a_truncated_number_is_not_an_object() -> None:
    whole = pydantic.RootModel[int]
    async with serving(FakeServer([message("12", finish=MAX_TOKENS)])) as fake, Client(fake.target) as client:
        with pytest.raises(MessageMismatch):
            _ = (await client.generate("x", json_schema=whole)).parsed


async def test_an_answer_rejected_by_the_class_says_why() -> None:
    script = [message('{"number":17}', finish=COMPLETE)]
    async with serving(FakeServer(script)) as fake, Client(fake.target) as client:
        found = await client.generate("x", json_schema=Bill)
    with pytest.raises(MessageMismatch, match="odd numbers are others'") as refused:
        _ = found.parsed
    assert isinstance(refused.value.__cause__, pydantic.ValidationError)
    assert refused.value.text == '{"number":17}'


def test_objects_for_threads() -> None:
    script = [message('{"number":18}', start=True, finish=COMPLETE)]
    with serving_in_a_thread(script) as fake, SyncClient(fake.target) as client:
        assert client.generate("x", json_schema=Bill).parsed == Bill(number=18)
        assert [each.parsed for each in client.stream("x", json_schema=Bill)] == [Bill(number=18)]
        assert [each.parsed for each in client.map(["x"], json_schema=Invoice)] == [Invoice(18)]


async def test_a_cut_message_keeps_its_text_too() -> None:
    script = [message('{"na', start=True), message('me":"a', finish=MAX_TOKENS)]
    async with serving(FakeServer(script, script[1:])) as fake, Client(fake.target) as client:
        with pytest.raises(MessageMismatch) as refused:
            _ = [each async for each in client.stream_messages("x", model_pb2.Model)]
        assert (refused.value.text, refused.value.finish_reason) == ('{"name":"a', "MAX_TOKENS")
        with pytest.raises(MessageMismatch) as refused:
            await client.generate_message("x", model_pb2.Model)
        assert (refused.value.text, refused.value.finish_reason) == ('me":"a', "MAX_TOKENS")


async def test_a_generated_message_class_is_refused_as_a_schema() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="a generated class is for message_type="):
            await client.generate("x", json_schema=model_pb2.Model)
