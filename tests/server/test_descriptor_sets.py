"""A descriptor set that was sent before is named by its digest, within an API key and within bounds."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.json_format import MessageToJson

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.core.ask import Origin
from photon_grpc.core.generation import Timing, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import DescriptorSetUnknown, InvalidConstraint, InvalidRequest
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish, Update
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import CallRules
from photon_grpc.server.typed import message_type
from photon_grpc.server.typed.message_type import MessageType, MessageTypes
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1.inference_pb2_grpc import InferenceServiceStub
from tests.server.described import file, message, serialized
from tests.server.failing import failure, info_of
from tests.server.fake_frontend import FakeFrontend, serving
from tests.server.keys import SECRETS, bearer, write_keys

PATH = "structured_output.protobuf.file_descriptor_set_sha256"


def files_of(*names: str, comment: str = "") -> bytes:
    described = file()
    for name in names:
        message(described, name, "number: string")
    if comment:
        described.source_code_info.location.add(path=[4, 0], span=[0, 0, 9], leading_comments=comment)
    return serialized(described)


FILES = files_of("Invoice", "Order")
DIGEST = hashlib.sha256(FILES).digest()


def typed(name: str, *, files: bytes = b"", digest: bytes = b"") -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id="r", text="x")
    request.structured_output.protobuf.CopyFrom(
        pb.StructuredOutput.Protobuf(
            file_descriptor_set=files, file_descriptor_set_sha256=digest, message_type=f"acme.{name}"
        )
    )
    return request


async def found(types: MessageTypes, request: pb.GenerateRequest, caller: str = "") -> MessageType:
    wanted = types.wanted(request.structured_output.protobuf, Origin(0.0, caller=caller))
    await wanted.constraint()
    assert wanted.found is not None
    return wanted.found


async def test_a_digest_stands_for_a_set_that_was_read() -> None:
    types = MessageTypes()
    first = await found(types, typed("Invoice", files=FILES))
    assert await found(types, typed("Invoice", digest=DIGEST)) is first
    assert (await found(types, typed("Order", digest=DIGEST))).name == "acme.Order"
    assert await found(types, typed("Invoice", files=FILES, digest=DIGEST)) is first
    with pytest.raises(InvalidConstraint, match=r"the set has no message 'acme\.Claim'"):
        await found(types, typed("Claim", digest=DIGEST))


async def test_a_digest_of_a_set_that_was_not_read_is_unknown() -> None:
    types, broken = MessageTypes(), FILES[:-3]
    with pytest.raises(InvalidConstraint):
        await found(types, typed("Invoice", files=broken))
    for digest in (DIGEST, hashlib.sha256(broken).digest()):
        with pytest.raises(DescriptorSetUnknown, match="does not hold the set") as unknown:
            await found(types, typed("Invoice", digest=digest))
        assert unknown.value.field == PATH


@pytest.mark.parametrize(
    ("files", "digest", "words"),
    [
        (b"", DIGEST[:-1], "has 31 bytes; a SHA-256 digest has 32"),
        (FILES, DIGEST.hex().encode(), "has 64 bytes"),
        (FILES, bytes(32), f"is {'00' * 32}, but the digest of file_descriptor_set is {DIGEST.hex()}"),
    ],
)
async def test_a_digest_that_is_none_or_another_sets_is_refused(files: bytes, digest: bytes, words: str) -> None:
    types = MessageTypes()
    await found(types, typed("Invoice", files=FILES))
    with pytest.raises(InvalidRequest, match=words) as refused:
        await found(types, typed("Invoice", files=files, digest=digest))
    assert refused.value.field == PATH and type(refused.value) is InvalidRequest


async def test_another_name_of_a_held_set_is_read_once() -> None:
    types = MessageTypes()
    await found(types, typed("Invoice", files=FILES))
    order = await found(types, typed("Order", digest=DIGEST))
    assert await found(types, typed("Order", files=FILES)) is order


async def test_sets_are_kept_within_bounds_and_a_share_for_every_caller() -> None:
    types = MessageTypes(max_cache_bytes=2**20)
    await found(types, typed("Invoice", files=FILES), "b")
    for number in range(40):
        last = files_of(f"Outer{number}")
        await found(types, typed(f"Outer{number}", files=last), "a")
    assert (await found(types, typed("Order", digest=DIGEST), "b")).name == "acme.Order"
    await found(types, typed("Outer39", digest=hashlib.sha256(last).digest()), "a")
    with pytest.raises(DescriptorSetUnknown):
        await found(types, typed("Outer0", digest=hashlib.sha256(files_of("Outer0")).digest()), "a")


async def test_comments_are_neither_kept_nor_counted() -> None:
    files = files_of("Invoice", comment="x" * 900_000)
    types = MessageTypes(max_cache_bytes=2**18)
    made = await found(types, typed("Invoice", files=files))
    assert len(made.files) < 1000 and message_type._num_bytes(made) < 2**17
    assert await found(types, typed("Invoice", digest=hashlib.sha256(files).digest())) is made


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[InferenceServiceStub, FakeFrontend]]:
    frontend = FakeFrontend()
    ring = KeyRing(str(write_keys(tmp_path / "keys.toml")))
    rules = CallRules(FailureLog(), keys=ApiKeys(ring, ("none",)))
    async with serving(frontend, rules=rules) as address, grpc.aio.insecure_channel(address) as channel:
        yield InferenceServiceStub(channel), frontend


def metadata(name: str) -> Any:
    return bearer(SECRETS[name])


async def test_a_set_of_another_key_is_unknown(served: tuple[InferenceServiceStub, FakeFrontend]) -> None:
    stub, frontend = served
    await stub.Generate(typed("Invoice", files=FILES), metadata=metadata("all"))
    for method in (stub.Generate, lambda *args, **kwargs: aread(stub.StreamGenerate(*args, **kwargs))):
        await method(typed("Invoice", digest=DIGEST), metadata=metadata("all"))
        error = await failure(method(typed("Invoice", digest=DIGEST), metadata=metadata("gen")))
        assert (error.code(), info_of(error).reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "DESCRIPTOR_SET_UNKNOWN",
        )
        assert info_of(error).metadata["field"] == PATH
    assert len(frontend.streams) == 3  # none of a request with an unknown digest


async def aread(call: Any) -> list[Any]:
    return [each async for each in call]


async def test_an_unknown_digest_is_an_item_of_its_stream(
    served: tuple[InferenceServiceStub, FakeFrontend],
) -> None:
    stub, _ = served
    call = stub.MultiplexGenerate(metadata=metadata("all"))
    codes = []
    for request in (typed("Invoice", digest=DIGEST), typed("Invoice", files=FILES), typed("Order", digest=DIGEST)):
        await call.write(pb.MultiplexGenerateRequest(generate=request))
        while not (item := (await call.read()).items[-1]).HasField("error") and not item.response.HasField("timing"):
            pass
        codes.append(item.error.code)
    assert codes == [grpc.StatusCode.FAILED_PRECONDITION.value[0], 0, 0]
    call.cancel()


async def test_json_writers_take_messages_of_types_that_they_do_not_know(
    served: tuple[InferenceServiceStub, FakeFrontend],
) -> None:
    stub, frontend = served
    finish = OutputFinish(FinishReason.EOS, eos_token_id=2, message_json=b'{"number":"17"}')
    frontend.script = [Update((OutputDelta(0, "x", finish=finish),), Usage(3, 1, 3), Timing(0.25, 0.5, 1.5, 2))]
    response = await stub.Generate(typed("Invoice", files=FILES), metadata=metadata("all"))
    packed = response.outputs[0].message
    assert '"typeUrl": "type.googleapis.com/acme.Invoice"' in MessageToJson(response)
    any_message = AnyMessage.FromString(packed.SerializeToString())
    assert (any_message.TypeName(), any_message.value) == ("acme.Invoice", b"\x0a\x0217")
    assert any_message.SerializeToString() == packed.SerializeToString()
