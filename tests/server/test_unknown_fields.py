"""Fields that this release does not know, in every request of ours and at any depth."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc import __version__
from photon_grpc.admin.v1 import admin_pb2
from photon_grpc.client.channel import SERVICE_CONFIG
from photon_grpc.errors import FeatureNotSupported
from photon_grpc.server.wire.unknown import refusing_unknown
from photon_grpc.server.wire.varint import varint
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from tests.attack.mutation import fill
from tests.examples import examples
from tests.server.failing import failure, info_of, trailer
from tests.server.fake_frontend import GENERATE, FakeFrontend, raw, serving
from tests.server.test_admin import operated

MODULES = (pb, model_pb2, admin_pb2)
SERVICES = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]
METHODS = [method for service in SERVICES for method in service.methods]


def delimited(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


NEW = number(900, 1)
BIAS = number(1, 5) + varint(2 << 3 | 5) + b"\0\0\0\0"
#: Bytes of a GenerateRequest -> the path of its unknown field.
PATHS = {
    NEW: "900",
    delimited(7, number(90, 1)): "sampling.90",
    delimited(5, delimited(1, b"") * 2 + delimited(1, NEW)): "chat.messages[2].900",
    delimited(5, delimited(5, delimited(1, delimited(7, b"x")))): "chat.tool_choice.required.7",
    delimited(9, delimited(6, delimited(8, b"x"))): "structured_output.protobuf.8",
    delimited(12, delimited(3, number(1, 3) + number(9, 9))): "scheduling.timeout.9",
    delimited(7, delimited(9, BIAS + number(3, 1))): "sampling.logit_bias[5].3",
    delimited(15, delimited(1, b"team") + delimited(2, b"a") + number(3, 1)): 'labels["team"].3',
    # A group.
    varint(900 << 3 | 3) + number(1, 2) + varint(900 << 3 | 4): "900",
    delimited(7, varint(90 << 3 | 3) + varint(90 << 3 | 4)): "sampling.90",
    # Known numbers with the wire type of another type.
    delimited(7, number(1, 1)): "sampling.temperature",
    delimited(15, delimited(1, b"team") + number(2, 1)): 'labels["team"].value',
    number(7, 1): "sampling",
    varint(7 << 3 | 3) + varint(7 << 3 | 4): "sampling",
    # Beside fields that are known, in a message too large for the event loop.
    delimited(3, b"x" * 20_000) + delimited(7, number(8, 1) + number(90, 1)): "sampling.90",
    delimited(5, delimited(1, delimited(2, b"x" * 50)) * 3000 + delimited(1, NEW)): "chat.messages[3000].900",
}
#: Encodings that a newer release or another library may choose for fields that are known.
KNOWN = {
    "a set zero": delimited(7, pb.SamplingParams(temperature=0).SerializeToString()),
    "defaults": delimited(1, b"") + number(14, 0),
    "unpacked": delimited(4, number(1, 5) + number(1, 6)),
    "twice": delimited(7, number(8, 1)) * 2 + delimited(1, b"a") + delimited(1, b"b"),
    "a long varint": delimited(7, varint(8 << 3) + b"\x81\x80\x00"),
    "a map's default": delimited(7, delimited(9, b"")),
    "a oneof that was replaced": delimited(5, NEW) + delimited(3, b"x"),
    "a descriptor set": delimited(
        9, delimited(6, delimited(1, delimited(1, delimited(900, b"?"))) + delimited(2, b"T"))
    ),
}


@pytest.mark.parametrize("data", PATHS, ids=lambda data: PATHS[data])
async def test_a_refusal_names_the_path(channel: grpc.aio.Channel, frontend: FakeFrontend, data: bytes) -> None:
    error = await failure(raw(channel, GENERATE)(delimited(3, b"hi") + data))
    info = info_of(error)
    assert (error.code(), info.reason) == (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_NOT_SUPPORTED")
    assert info.metadata["field"] == PATHS[data]
    holder, _, name = PATHS[data].rpartition(".")
    text = error.details() or ""
    assert text.endswith(
        (
            f" to this release ({__version__}); upgrade the server first",
            f" has another type in release {__version__}; compare the protos",
        )
    )
    # Nothing that the model lacks.
    assert "feature" not in info.metadata
    assert not holder or f" in {holder} " in text
    assert not name.isdecimal() or text.startswith(f"field {name} ")
    assert trailer(error, "grpc-retry-pushback-ms") is None and not frontend.asks


@pytest.mark.parametrize("name", KNOWN)
def test_no_encoding_of_known_fields_is_refused(name: str) -> None:
    data = KNOWN[name]
    parse = refusing_unknown(pb.GenerateRequest.FromString)
    assert parse(data).ListFields() is not None
    assert parse(data + delimited(2, b"x" * 20_000)).model == "x" * 20_000


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
async def test_every_request_of_ours_refuses(
    channel: grpc.aio.Channel, frontend: FakeFrontend, tmp_path: Path, method: Any
) -> None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:  # see test_multiplex.py
        return
    if method.containing_service.name != "AdminService":
        error = await failure(raw(channel, path, stream=method.server_streaming)(NEW))
    else:
        async with (
            operated(f"unix:{tmp_path}/admin.sock") as replica,
            grpc.aio.insecure_channel(replica.address) as admin,
        ):
            error = await failure(raw(admin, path, stream=method.server_streaming)(NEW))
            assert not replica.drains and not replica.frontend.orders
    assert (error.code(), info_of(error).metadata["field"]) == (grpc.StatusCode.UNIMPLEMENTED, "900")


async def test_requests_of_standard_services_stay_as_they_are(channel: grpc.aio.Channel) -> None:
    answer = await raw(channel, "/grpc.health.v1.Health/Check")(NEW)
    assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING
    reflect = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    async for _ in reflect(iter([NEW + delimited(7, b"")])):
        break
    report = raw(channel, "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics", stream=True)(NEW)
    await report.read()
    report.cancel()


def test_a_message_of_another_package_keeps_protobufs_rule() -> None:
    parse = health_pb2.HealthCheckRequest.FromString
    assert refusing_unknown(parse) is parse


async def test_every_model_lists_the_feature() -> None:
    async with serving(FakeFrontend()) as address, grpc.aio.insecure_channel(address) as channel:
        model = model_pb2.GetModelResponse.FromString(await raw(channel, "/photon_grpc.v1.ModelService/GetModel")(b""))
    assert model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED in model.model.features


def test_the_refusal_is_not_retried() -> None:
    for method in SERVICE_CONFIG["methodConfig"]:
        assert "UNIMPLEMENTED" not in method["retryPolicy"]["retryableStatusCodes"]


def test_no_request_has_an_enum() -> None:
    """An unknown value of an enum is no unknown field, so the first enum in a request needs a check of its own."""
    seen: dict[str, Descriptor] = {}

    def visit(message: Descriptor) -> None:
        if message.full_name not in seen:
            seen[message.full_name] = message
            for field in message.fields:
                assert field.enum_type is None, field.full_name
                if field.message_type is not None:
                    visit(field.message_type)

    for method in METHODS:
        visit(method.input_type)
    assert len(seen) > len(METHODS)


def parts(message: Message, path: str = "") -> Iterator[tuple[str, Message]]:
    """Yield every message that is set, with its path; the entries of maps are none."""
    yield path, message
    for field, value in message.ListFields():
        below = f"{path}.{field.name}".lstrip(".")
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for index, each in enumerate(value):
                yield from parts(each, f"{below}[{index}]")
        else:
            yield from parts(value, below)


@settings(max_examples=examples(200), deadline=None)
@given(
    draw=st.randoms(use_true_random=False),
    method=st.sampled_from(METHODS),
    unknown=st.sampled_from(
        [NEW, delimited(900, b"abc"), varint(900 << 3 | 5) + b"1234", varint(900 << 3 | 1) + b"x" * 8]
    ),
)
def test_any_unknown_field_anywhere_is_named_and_none_is_made_up(
    draw: random.Random, method: Any, unknown: bytes
) -> None:
    message_class = GetMessageClass(method.input_type)
    parse = refusing_unknown(message_class.FromString)
    message = fill(message_class(), draw)
    assert parse(message.SerializeToString()).SerializeToString(deterministic=True) == message.SerializeToString(
        deterministic=True
    )
    path, holder = draw.choice([*parts(message)])
    holder.MergeFromString(unknown)
    with pytest.raises(FeatureNotSupported) as caught:
        parse(message.SerializeToString())
    assert caught.value.field == f"{path}.900".lstrip(".")


@pytest.mark.parametrize("at", [0, 9_000])
def test_a_field_beyond_what_is_searched_is_refused_too(at: int) -> None:
    request = pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(content="some text")] * 9_500))
    refusing_unknown(pb.GenerateRequest.FromString)(request.SerializeToString())
    request.chat.messages[at].MergeFromString(b"\xa0\x38\x01")
    with pytest.raises(FeatureNotSupported) as refused:
        refusing_unknown(pb.GenerateRequest.FromString)(request.SerializeToString())
    assert refused.value.field == ("" if at else "chat.messages[0].900")
