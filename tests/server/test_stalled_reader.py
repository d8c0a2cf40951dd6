"""A reader that reads nothing, with a real front end, engine and API keys; only the runner is a fake.

Its updates are merged, it is cut off in time, its key gets its share back, and nobody else is slowed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.bridge.local import LocalClient
from photon_grpc.core.ports import EnginePorts
from photon_grpc.core.quotas import Quotas
from photon_grpc.engine.engine import Engine
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.quotas import FrontendQuotas
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import CallRules
from photon_grpc.server.wire import writer
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack.http2 import connected, grpc_message
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting
from tests.frontend.fake_engine import served
from tests.server.failing import info_of
from tests.server.fake_frontend import serving, until
from tests.server.keys import bearer, block, write_keys

STREAM_GENERATE = "/photon_grpc.v1.InferenceService/StreamGenerate"
MULTIPLEX_GENERATE = "/photon_grpc.v1.InferenceService/MultiplexGenerate"
NUM_TOKENS = 200
STALL_LIMIT_S = 0.2
STEP_S = 0.002


@dataclass
class Service:
    address: str
    frontend: Frontend
    harness: Harness
    #: What the writer reads as the time, so that no reader is cut off before a test lets time pass.
    now_s: float = 0.0


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    keys = write_keys(tmp_path / "keys.toml", block("stalls", "secret-a", max_concurrent=1), block("reads", "secret-b"))
    ring = KeyRing(str(keys))
    harness = Harness(Setting(max_model_len=256, num_blocks=200, fair=True))
    client = LocalClient(asyncio.get_running_loop(), harness.facts)
    host = client.host()
    # The engine runs in this process, so without a pause it would end an output before the first token is written.
    compute = harness.runner.submit
    monkeypatch.setattr(harness.runner, "submit", lambda batch: (time.sleep(STEP_S), compute(batch))[1])
    engine = Engine(harness.scheduler, harness.runner, EnginePorts(host, host, harness.post), harness.facts)
    with ThreadPoolExecutor(1) as pool:
        encoder = ThreadEncoder(served(), pool)
        frontend = Frontend(link=client, model=served(), encoder=encoder, quotas=FrontendQuotas(Quotas(ring.limits)))
        running = asyncio.create_task(asyncio.to_thread(engine.run))
        rules = CallRules(FailureLog(), keys=ApiKeys(ring, ("none",)))
        async with serving(frontend, rules=rules, stall_limit_s=STALL_LIMIT_S) as address:  # type: ignore[arg-type]
            service = Service(address, frontend, harness)
            monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: service.now_s))
            yield service
        host.close()
        await running


def ask(request_id: str, prompt: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=[prompt, 2, 3]),
        sampling=pb.SamplingParams(seed=7),
        stop=pb.StopParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True, text=False),
    )


@pytest.mark.parametrize("path", [STREAM_GENERATE, MULTIPLEX_GENERATE])
async def test_a_slow_reader_is_cut_off_and_delays_nobody(service: Service, path: str) -> None:
    request = ask("stalled", 1)
    data = (
        pb.MultiplexGenerateRequest(generate=request) if path == MULTIPLEX_GENERATE else request
    ).SerializeToString()
    async with grpc.aio.insecure_channel(service.address) as channel:
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
        with connected(service.address, window=0) as connection:
            connection.call(1, path, grpc_message(data), authorization="Bearer secret-a")
            await until(lambda: service.frontend.num_streams == 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(ask("another", 1), metadata=bearer("secret-a"))
            assert info_of(caught.value).reason == "QUOTA_EXCEEDED"
            # Neither the engine nor anybody else waits for the reader.
            answer = await generate(ask("beside", 5), metadata=bearer("secret-b"))
            assert list(answer.outputs[0].token_ids) == complete([5, 2, 3], NUM_TOKENS, seed=7)
            await until(lambda: service.frontend.load.running == 0)
            assert service.frontend.num_streams == 1
            service.now_s += 2 * STALL_LIMIT_S
            await until(lambda: service.frontend.num_streams == 0)
        answer = await generate(ask("after", 1), metadata=bearer("secret-a"))
        assert answer.usage.output_tokens == NUM_TOKENS
