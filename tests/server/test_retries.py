"""Calls that declare themselves retries, over a real socket, with a real front end and engine and a fake runner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from photon_grpc.bridge.local import LocalClient
from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import EnginePorts
from photon_grpc.engine.engine import Engine
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack.http2 import DATA, connected, grpc_message
from tests.engine.fakes import FinishedStep, complete
from tests.engine.harness import Harness, Setting
from tests.frontend.fake_engine import served
from tests.server.fake_frontend import serving

GENERATE = "/photon_grpc.v1.InferenceService/Generate"
#: The header that gRPC adds to its retries, and removes if a caller sends it.
ANOTHER_ATTEMPT = {"grpc_previous_rpc_attempts": "1"}
NUM_TOKENS = 200


@pytest.fixture
def hurry() -> threading.Event:
    """Until it is set, the engine takes 20 ms per step, so a request is still in flight when the next call arrives."""
    return threading.Event()


@pytest.fixture
async def address(hurry: threading.Event) -> AsyncIterator[str]:
    harness = Harness(Setting(max_model_len=256, num_blocks=200))
    client = LocalClient(asyncio.get_running_loop(), harness.facts)
    host = client.host()
    engine = Engine(harness.scheduler, harness.runner, EnginePorts(host, host, harness.post), harness.facts)
    submit = harness.runner.submit

    def slowly(batch: Batch) -> FinishedStep:
        hurry.wait(0.02)
        return submit(batch)

    harness.runner.submit = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        frontend = Frontend(link=client, model=served(), encoder=ThreadEncoder(served(), pool))
        running = asyncio.create_task(asyncio.to_thread(engine.run))
        async with serving(frontend) as bound:  # type: ignore[arg-type]
            yield bound
        host.close()
        await running


@pytest.fixture
async def stub(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def ask(*prompt: int, seed: int | None = None, **stop: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="known",
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(seed=seed),
        stop=pb.StopParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True} | stop),
        output=pb.OutputOptions(token_ids=True, text=False),
    )


async def begun(stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest) -> AsyncIterator[list[int]]:
    """Return the ids of each message of a stream that is in flight."""
    call = stub.StreamGenerate(request)
    batches = ([id for delta in message.deltas for id in delta.token_ids] async for message in call)
    while not await anext(batches):
        pass
    return batches


def generate(address: str, request: pb.GenerateRequest, **headers: str) -> pb.GenerateResponse | str:
    """Call Generate with raw bytes and any headers; return the answer, or the header block that refuses it."""
    answer = b""
    with connected(address) as connection:
        connection.call(1, GENERATE, grpc_message(request.SerializeToString()), **headers)
        for frame in connection.frames():
            if frame.kind == DATA:
                answer += frame.payload
            elif frame.ends_stream:
                return pb.GenerateResponse.FromString(answer[5:]) if answer else frame.payload.decode("latin-1")
    raise ConnectionError("closed without an answer")


@pytest.mark.parametrize(
    "other", [ask(9, 9, 9, seed=7), ask(1, 2, 3, seed=8), ask(1, 2, 3), ask(1, 2, 3, seed=7, max_tokens=3)]
)
async def test_another_request_under_the_same_id_is_refused_without_ending_the_first(
    address: str, stub: inference_pb2_grpc.InferenceServiceStub, hurry: threading.Event, other: pb.GenerateRequest
) -> None:
    rest = await begun(stub, ask(1, 2, 3, seed=7))
    answer = await asyncio.to_thread(generate, address, other, **ANOTHER_ATTEMPT)
    assert isinstance(answer, str) and "is in flight already" in answer
    hurry.set()
    ids = [id async for batch in rest for id in batch]
    assert ids and ids == complete([1, 2, 3], NUM_TOKENS, seed=7)[-len(ids) :]


@pytest.mark.parametrize("seed", [7, None])
async def test_the_same_request_takes_the_place_of_its_earlier_attempt(
    address: str, hurry: threading.Event, stub: inference_pb2_grpc.InferenceServiceStub, seed: int | None
) -> None:
    rest = await begun(stub, ask(1, 2, 3, seed=seed))
    second = asyncio.create_task(asyncio.to_thread(generate, address, ask(1, 2, 3, seed=seed), **ANOTHER_ATTEMPT))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in rest:
            pass
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    hurry.set()
    answer = await second
    assert isinstance(answer, pb.GenerateResponse) and len(answer.outputs[0].token_ids) == NUM_TOKENS


async def test_without_the_header_the_same_request_is_a_second_one(
    address: str, hurry: threading.Event, stub: inference_pb2_grpc.InferenceServiceStub
) -> None:
    await begun(stub, ask(1, 2, 3, seed=7))
    answer = await asyncio.to_thread(generate, address, ask(1, 2, 3, seed=7))
    assert isinstance(answer, str) and "is in flight already" in answer
    hurry.set()
