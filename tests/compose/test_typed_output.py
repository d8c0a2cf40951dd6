"""Typed outputs of the embedded model, through gRPC: what completes is a message."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from operator import attrgetter
from random import Random
from typing import Any, Literal

import grpc
import pydantic
import pytest
from google.protobuf.any_pb2 import Any as Any_
from google.protobuf.json_format import Parse, ParseDict, ParseError
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int32Value

from photon_grpc import LLM, demo
from photon_grpc.client import Generation, MessageMismatch, SyncClient
from photon_grpc.client.options import build_request
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidConstraint, InvalidRequest
from photon_grpc.server.server import Server
from photon_grpc.server.typed.message_type import read_message_type
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc
from tests.compose import drawn_messages
from tests.compose.test_structured_output import COMPLETE, PROMPT, TOKENIZER, answers, asked, reason
from tests.server.described import enum, file, message, serialized

#: Outputs of random types; the long form: NUM_TYPED_OUTPUTS=10000, ten minutes.
NUM_DRAWN = int(os.environ.get("NUM_TYPED_OUTPUTS", "100"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo.DRAFT, device="cpu", max_num_seqs=64, num_blocks=1024, block_size=8) as llm:
        yield llm


def test_every_complete_output_of_a_random_type_is_parsed(llm: LLM) -> None:
    random, num_complete, num_full = Random(11), 0, 0
    for start in range(0, NUM_DRAWN, 50):
        types = [read_message_type(*drawn_messages.draw(random)) for _ in range(min(25, NUM_DRAWN - start))]
        asks = [
            asked(
                2 * start + number,
                types[number // 2].constraint,
                max_tokens=80,
            )
            for number in range(2 * len(types))
        ]
        for number, output in enumerate(answers(llm, asks)):
            assert output.finish is not None
            if reason(output) in COMPLETE:
                num_complete += 1
                num_full += output.text != "{}"
                assert output.finish.message_json.decode() == output.text
                types[number // 2].parse(output.text).SerializeToString()
            else:
                assert reason(output) is FinishReason.MAX_TOKENS and not output.finish.message_json
    assert num_complete > 0.6 * NUM_DRAWN and num_full > 0.4 * NUM_DRAWN
    print(f"{num_complete} of {NUM_DRAWN} complete, {num_full} not empty")


def ledger() -> tuple[bytes, str]:
    described = file(syntax="proto2")
    enum(described, "Color", "COLOR_NONE", "RED")
    message(
        described,
        "Ledger",
        "count: required uint32",
        "color: required .acme.Color",
        "days: map int32 bool",
        "paid: repeated int64",
    )
    return serialized(described), "acme.Ledger"


LEDGER = read_message_type(*ledger()).message_class


@pytest.fixture(scope="module")
def target(llm: LLM) -> Iterator[str]:
    """Yield the address of a server in front of the LLM."""
    program = llm._program

    async def serve() -> tuple[Server, str]:
        server = Server(program._frontend, config=ServerConfig())
        return server, (await server.start(("127.0.0.1:0",), reuse_port=False))[0]

    server, address = program.wait(serve())
    yield address
    program.wait(server.drain_and_stop(0))


def typed(client: SyncClient, message_type: type[Message], **options: Any) -> Any:
    return client.generate(PROMPT, message_type=message_type, temperature=1.5, token_ids=True, **options)


def complete(client: SyncClient, **options: Any) -> tuple[int, Generation]:
    """Return a seed with which an output is complete after some tokens, and that output."""
    for seed in range(100):
        found = typed(client, LEDGER, seed=seed, max_tokens=40, **options)
        if found.message is not None and len(found.token_ids) > 8:
            return seed, found
    raise AssertionError("none is complete")


def test_the_client_takes_a_class_and_gives_its_message(target: str) -> None:
    with SyncClient(target) as client:
        several = typed(client, LEDGER, seed=6, max_tokens=40, num_outputs=4)
        for output in several.outputs:
            assert (output.message is not None) == (output.finish.reason != "MAX_TOKENS")
            assert output.message is None or isinstance(output.message, LEDGER)
        seed, found = complete(client)
        assert found.message == Parse(found.text, LEDGER())
        *_, last = client.stream(
            PROMPT, message_type=LEDGER, temperature=1.5, seed=seed, max_tokens=40, text=False, token_ids=True
        )
        assert last.message == found.message and last.text == ""


def test_an_output_that_goes_on_gives_the_whole_message_and_a_cut_one_none(target: str) -> None:
    with SyncClient(target) as client:
        seed, whole = complete(client)
        for cut in range(1, len(whole.token_ids), 3):
            assert typed(client, LEDGER, seed=seed, max_tokens=cut).message is None
            rest = typed(client, LEDGER, seed=seed, max_tokens=40, continue_from=whole.token_ids[:cut])
            assert rest.message == whole.message


def test_a_key_that_a_map_has_twice_keeps_its_last_value(llm: LLM, target: str) -> None:
    """What an output begins with is given: the key 7 three times, of which the text has every one."""
    begun = '{"count":3,"color":"RED","days":{"7":false,"8":false,"7":false,"7":true'
    ids = TOKENIZER.encode(begun, add_special_tokens=False)
    options: dict[str, Any] = {"message_type": LEDGER, "temperature": 1.5, "max_tokens": 60, "continue_from": ids}
    with SyncClient(target) as client:
        found = client.generate(PROMPT, seed=1, token_ids=True, **options)
        *_, last = client.stream(PROMPT, seed=1, **options)
    text = TOKENIZER.decode([*ids, *found.token_ids])
    assert text.startswith(begun) and found.message.days[7] is True and found.message.days[8] is False
    assert found.message == last.message == ParseDict(json.loads(text), LEDGER())
    with pytest.raises(ParseError, match="duplicate key"):
        Parse(text, LEDGER())
    (here,) = llm.generate(PROMPT, seed=1, **options)
    assert here.message == found.message


def test_a_token_that_ends_an_output_is_no_part_of_its_message(target: str) -> None:
    with SyncClient(target) as client:
        shown = {"stop_token_ids": tuple(range(300, 2000)), "include_stop_in_text": True}
        found = [typed(client, Int32Value, seed=seed, max_tokens=9, **shown) for seed in range(8)]
        stopped = [each for each in found if each.finish.reason == "STOP_TOKEN"]
        assert stopped and all(each.text.startswith(str(each.message.value)) for each in stopped)
        assert any(each.text != str(each.message.value) for each in stopped)


def test_a_program_takes_a_class_and_gives_its_messages(llm: LLM) -> None:
    options: dict[str, Any] = {"message_type": LEDGER, "temperature": 1.5, "seed": 6}
    found = llm.generate([PROMPT, f"{PROMPT} "], **options, num_outputs=8, max_tokens=40)
    for each in found:
        assert each.message == (Parse(each.text, LEDGER()) if each.finish_reason in COMPLETE else None)
    assert any(each.message is not None for each in found)
    assert llm.generate(PROMPT, **options, max_tokens=1)[0].message is None
    with pytest.raises(InvalidRequest, match="not a message class"):
        llm.generate(PROMPT, message_type=int)
    with pytest.raises(InvalidRequest, match="message_type"):
        llm.generate(PROMPT, message_type=3)
    with pytest.raises(InvalidRequest, match="regex: protobuf is set, too"):
        llm.generate(PROMPT, message_type=LEDGER, regex="a")


def test_a_bad_type_is_refused_by_name(target: str) -> None:
    with SyncClient(target) as client:
        with pytest.raises(InvalidConstraint, match=r"google\.protobuf\.Any"):
            typed(client, Any_)
        with pytest.raises(InvalidRequest, match="not a message class"):
            typed(client, int)  # type: ignore[arg-type]


@dataclass
class Claim:
    kind: Literal["fire", "water"]
    day: date
    is_paid: bool | None
    before: Claim | None = None


class Model(pydantic.BaseModel):
    claims: list[bool] = pydantic.Field(max_length=3)
    note: str = pydantic.Field(default="", max_length=5)


def test_an_answer_is_an_object_of_a_dataclass_or_of_pydantic(llm: LLM, target: str) -> None:
    """The same through a program, a call, a stream and a shared stream; those that are cut off say so."""
    options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 22, "num_outputs": 4, "seed": 3}
    num_cut = num_read = 0
    with SyncClient(target) as client, client.multiplex() as many:
        for kind in (Claim, Model):
            answers = [*client.generate(PROMPT, json_schema=kind, **options).outputs]
            answers += many.generate(PROMPT, json_schema=kind, **options).outputs
            ends = [each for each in client.stream(PROMPT, json_schema=kind, **options) if each.finish]
            ends += [each for each in many.stream(PROMPT, json_schema=kind, **options) if each.finish]
            told = [*llm.generate(PROMPT, json_schema=kind, **options), *answers]
            told += sorted(ends[:4], key=attrgetter("index")) + sorted(ends[4:], key=attrgetter("index"))
            assert len(told) == 20
            for number, each in enumerate(told):
                text = told[number % 4].text
                try:
                    assert each.parsed == pydantic.TypeAdapter(kind).validate_json(text)
                    num_read += 1
                except MessageMismatch as error:
                    assert (error.text, error.finish_reason) == (text, "MAX_TOKENS")
                    num_cut += 1
    assert num_cut and num_read


def test_a_multiplexed_request_gets_its_message(target: str) -> None:
    request = build_request(PROMPT, {"message_type": Int32Value, "max_tokens": 20, "seed": 4, "request_id": "one"})
    with grpc.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.MultiplexGenerate(iter([inference_pb2.MultiplexGenerateRequest(generate=request)]))
        deltas = [delta for frame in call for item in frame.items for delta in item.response.deltas]
    packed = Any_.FromString(deltas[-1].message.SerializeToString())
    found = Int32Value()
    assert packed.Unpack(found)
    assert found.value == int("".join(delta.text for delta in deltas))
