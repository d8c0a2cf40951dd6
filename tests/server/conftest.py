"""Fixtures: a served fake front end and a channel to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from photon_grpc.v1 import inference_pb2_grpc, model_pb2_grpc
from tests.server.fake_frontend import FakeFrontend, serving


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
async def address(frontend: FakeFrontend) -> AsyncIterator[str]:
    async with serving(frontend) as bound:
        yield bound


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened


@pytest.fixture
def inference(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceServiceStub:
    return inference_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture
def models(channel: grpc.aio.Channel) -> model_pb2_grpc.ModelServiceStub:
    return model_pb2_grpc.ModelServiceStub(channel)
