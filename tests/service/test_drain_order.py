"""The end of a service in the order of Kubernetes, and what it does to every kind of call; with two front ends."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from photon_grpc.admin.v1 import admin_pb2, admin_pb2_grpc
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.server.keys import bearer, block, write_keys
from tests.service.kubelet import Kubelet, Probe, grpc_serves
from tests.service.running import NOT_SERVING, READINESS, SERVING, RunningService, modelless, wait_until
from tests.service.test_processes import reason_of
from tests.service.tiny import write_tiny_model

#: More than front ends: with every connection balanced at random, hardly ever all at one of them.
NUM_CONNECTIONS = 8


@contextlib.contextmanager
def tiny_service(path: Path, *flags: str) -> Iterator[RunningService]:
    tiny = write_tiny_model(path / "tiny")
    with modelless("--model", str(tiny), "--load-format", "dummy", "--num-blocks", "4096", *flags) as service:
        service.wait_ready(limit_s=240.0)
        yield service


@contextlib.contextmanager
def connection(address: str) -> Iterator[Any]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(address, options) as channel:
        yield channel


def admin_socket(service: RunningService) -> str:
    (address,) = re.findall(r"admin service on (unix:\S+)", "\n".join(service.lines))
    return address


def asked(max_tokens: int, request_id: str = "") -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="def", request_id=request_id)
    request.stop.max_tokens, request.stop.ignore_eos = max_tokens, True
    return request


def refusal(stub: Any, request_id: str) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        stub.Generate(asked(1, request_id), metadata=bearer("secret"), timeout=120)
    return reason_of(refused.value)


class Multiplexed:
    """A stream of requests that its caller leaves open."""

    def __init__(self, channel: grpc.Channel, *requests: pb.GenerateRequest) -> None:
        self._is_over = threading.Event()
        self.call = inference_pb2_grpc.InferenceServiceStub(channel).MultiplexGenerate(self._actions(requests))

    def _actions(self, requests: tuple[pb.GenerateRequest, ...]) -> Iterator[pb.MultiplexGenerateRequest]:
        for request in requests:
            yield pb.MultiplexGenerateRequest(generate=request)
        self._is_over.wait()

    def rest(self) -> list[pb.MultiplexGenerateResponse]:
        """Return all frames until the stream ends by a failure."""
        frames: list[pb.MultiplexGenerateResponse] = []
        try:
            frames.extend(self.call)
        except grpc.RpcError:
            return frames
        finally:
            self._is_over.set()
        raise AssertionError("it ended well")


@contextlib.contextmanager
def probed(service: RunningService) -> Iterator[Kubelet]:
    address, kubelet = service.wait_ready()[0], Kubelet(service.process)
    readiness, liveness = (Probe(partial(grpc_serves, address, asked)) for asked in (READINESS, ""))
    with kubelet.probing(readiness, liveness):
        yield kubelet


def assert_draining(error: grpc.RpcError) -> None:
    """UNAVAILABLE / DRAINING, and when to come back."""
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0


def test_a_pod_ends_in_order_and_what_runs_finishes(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(tiny_service(tmp_path, "--frontends", "2"))
        kubelet = stack.enter_context(probed(service))
        channel = stack.enter_context(connection(service.wait_ready()[0]))
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
        assert next(watch).status == SERVING
        loads = admin_pb2_grpc.AdminServiceStub(stack.enter_context(connection(admin_socket(service)))).WatchLoad(
            admin_pb2.WatchLoadRequest(min_interval={"nanos": 50_000_000})
        )
        next(loads)
        running = inference.StreamGenerate(asked(1500))
        next(running)
        shared, idle = Multiplexed(channel, asked(1500, "shared")), Multiplexed(channel)
        next(shared.call)
        deleting = threading.Thread(target=kubelet.delete, args=(lambda: time.sleep(0.2), 60.0))
        deleting.start()
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            inference.Generate(asked(1), timeout=120)
        assert_draining(refused.value)
        alive = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120)
        assert alive.status == SERVING
        assert idle.rest() == []
        assert (idle.call.code(), reason_of(idle.call)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert list(running)[-1].usage.output_tokens == 1500
        assert shared.rest()[-1].items[-1].response.usage.output_tokens == 1500
        assert list(watch) == [] and watch.code() is grpc.StatusCode.OK
        list(loads)
        assert loads.code() is grpc.StatusCode.OK
        deleting.join()
    assert kubelet.told == ["ready", "preStop", "SIGTERM", "unready", "exit 0"]


def test_a_drain_as_the_hook_counts_what_all_front_ends_still_have_at_its_limit(tmp_path: Path) -> None:
    """Also send SIGTERM, as Kubernetes does, which must not shorten the drain.

    Until then a key's requests in flight and request ids count for all front ends.
    """
    keys = write_keys(tmp_path / "keys.toml", block("some", "secret", max_concurrent=NUM_CONNECTIONS))
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(tiny_service(tmp_path, "--frontends", "2", "--api-keys-file", str(keys)))
        kubelet = stack.enter_context(probed(service))
        channels = [stack.enter_context(connection(service.wait_ready()[0])) for _ in range(NUM_CONNECTIONS)]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        streams = [stub.StreamGenerate(asked(4000, "one"), metadata=bearer("secret")) for stub in stubs[:1]]
        next(streams[0])
        assert {refusal(stub, "one") for stub in stubs} == {"DUPLICATE_REQUEST_ID"}
        streams += [stub.StreamGenerate(asked(4000), metadata=bearer("secret")) for stub in stubs[1:]]
        for stream in streams[1:]:
            next(stream)
        assert {refusal(stub, "another") for stub in stubs} == {"QUOTA_EXCEEDED"}
        admin = admin_pb2_grpc.AdminServiceStub(stack.enter_context(connection(admin_socket(service))))
        left: list[int] = []

        def drain() -> None:
            answer = admin.Drain(admin_pb2.DrainRequest(timeout={"nanos": 500_000_000}), timeout=60)
            left.append(answer.remaining_requests)

        assert kubelet.delete(drain, 60.0) == 0
        assert left == [NUM_CONNECTIONS]
        for stream in streams:
            with pytest.raises(grpc.RpcError) as ended:
                list(stream)
            assert_draining(ended.value)
    assert kubelet.told[:2] == ["ready", "preStop"]
    assert kubelet.told[-1] == "exit 0" and "unhealthy" not in kubelet.told


def test_a_second_signal_hurries(tmp_path: Path) -> None:
    with (
        tiny_service(tmp_path, "--drain-timeout", "600") as service,
        connection(service.wait_ready()[0]) as channel,
    ):
        running = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(asked(4000))
        next(running)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: any("draining" in line for line in service.lines), "the drain")
        time.sleep(0.6)  # signals closer together are one wish
        assert service.end(signal.SIGTERM) == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError) as ended:
            list(running)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
