"""The numerics version is told with every answer of our own services, and its parts by GetModel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from photon_grpc import errors
from photon_grpc.core.frames import Facts
from photon_grpc.core.numerics import Numerics
from photon_grpc.v1 import inference_pb2_grpc, model_pb2, model_pb2_grpc
from tests.server.fake_frontend import ASK, FakeFrontend, facts, raw, serving

KEY = "x-photon-numerics"
NUMERICS = Numerics("", 3, "strict", "triton", ("torch 2.11.0", "cublas 13.1.0"), "9.0", *("bfloat16",) * 4).signed()


@pytest.fixture
def frontend() -> FakeFrontend:
    fake = FakeFrontend()
    fake.numerics_version = NUMERICS.version
    fake.served = (replace(facts("demo"), numerics=NUMERICS),)
    return fake


@pytest.fixture
async def channel(frontend: FakeFrontend) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(frontend) as address, grpc.aio.insecure_channel(address) as opened:
        yield opened


async def test_every_answer_has_the_version_at_its_begin_and_end(channel: grpc.aio.Channel) -> None:
    inference = inference_pb2_grpc.InferenceServiceStub(channel)
    models = model_pb2_grpc.ModelServiceStub(channel)
    stream = inference.StreamGenerate(ASK)
    assert [message async for message in stream]
    for call in (stream, inference.Generate(ASK), models.GetModel(model_pb2.GetModelRequest())):
        assert dict(await call.initial_metadata())[KEY] == NUMERICS.version
        assert dict(await call.trailing_metadata())[KEY] == NUMERICS.version


async def test_a_failed_call_has_it_in_the_trailers_only(channel: grpc.aio.Channel, frontend: FakeFrontend) -> None:
    frontend.refusals = [errors.QueueFull("full")]
    call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(ASK)
    await call.code()
    assert KEY not in dict(await call.initial_metadata())
    assert dict(await call.trailing_metadata())[KEY] == NUMERICS.version


async def test_it_is_absent_without_an_engine_and_for_who_needs_no_key(
    channel: grpc.aio.Channel, frontend: FakeFrontend
) -> None:
    check = raw(channel, "/grpc.health.v1.Health/Check")(b"")
    await check
    assert KEY not in dict(await check.trailing_metadata())
    frontend.numerics_version = ""
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(ASK)
    assert KEY not in dict(await call.initial_metadata()) and KEY not in dict(await call.trailing_metadata())


async def test_get_model_tells_version_and_parts(channel: grpc.aio.Channel, frontend: FakeFrontend) -> None:
    models = model_pb2_grpc.ModelServiceStub(channel)
    model = (await models.GetModel(model_pb2.GetModelRequest())).model
    assert model.numerics_version == NUMERICS.version
    told = model.numerics
    parts = Numerics(
        model.numerics_version,
        *(told.number, told.mode, told.kernels, tuple(told.libraries), told.device),
        *(told.dtype, told.weights, told.activations, told.kv_cache),
    )
    assert parts == NUMERICS
    frontend.served = (facts("demo"),)
    model = (await models.GetModel(model_pb2.GetModelRequest())).model
    assert not model.numerics_version and not model.HasField("numerics")


def test_the_engine_tells_it_once() -> None:
    """It is one field of the Facts, so it crosses to every front end with them."""
    assert [name for name in Facts.__struct_fields__ if "numerics" in name] == ["numerics"]
