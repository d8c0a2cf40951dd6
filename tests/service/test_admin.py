"""AdminService of a whole service, over the socket that it tells at start."""

from __future__ import annotations

import re
import signal
import socket as host
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import grpc
import pytest

from photon_grpc.admin.v1 import admin_pb2, admin_pb2_grpc
from photon_grpc.bridge.control import Begin, CannotStart
from photon_grpc.config.flags import ModelFlags, ServeConfig, ServerConfig
from photon_grpc.service.processes.child import CANNOT_START, Child, ChildCommand
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.service.running import RunningService, modelless, wait_until
from tests.service.test_processes import reason_of
from tests.service.tiny import write_tiny_model


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """With one seat. The last test ends it."""
    tiny = write_tiny_model(tmp_path_factory.mktemp("admin") / "tiny")
    flags = ("--model", str(tiny), "--load-format", "dummy", "--num-blocks", "512", "--max-num-seqs", "1")
    with modelless(*flags) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="module")
def socket(service: RunningService) -> Path:
    (path,) = re.findall(r"admin service on unix:(\S+)", "\n".join(service.lines))
    return Path(path)


@pytest.fixture
def admin(socket: Path) -> Iterator[Any]:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


@pytest.fixture
def inference(service: RunningService) -> Iterator[Any]:
    with grpc.insecure_channel(service.wait_ready()[0], [("grpc.enable_retries", 0)]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def request(request_id: str, text: str = "def", max_tokens: int = 3500) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(text=text, request_id=request_id)
    asked.stop.max_tokens, asked.stop.ignore_eos = max_tokens, True
    return asked


def load_of(admin: Any) -> admin_pb2.Load:
    return admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=120).load


def test_the_socket_is_named_after_the_process_and_for_its_group(service: RunningService, socket: Path) -> None:
    assert str(service.process.pid) in socket.name
    assert stat.S_IMODE(socket.stat().st_mode) == 0o660


@pytest.fixture
def said(tmp_path: Path) -> Iterator[TextIO]:
    with open(tmp_path / "said", "w+") as file:
        yield file


async def test_an_address_that_is_taken_while_a_front_end_starts_is_named_and_nothing_else_is_said(
    tmp_path: Path, said: TextIO
) -> None:
    """By a stranger, after the supervisor has looked whether it is free."""
    with host.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = f"127.0.0.1:{stranger.getsockname()[1]}"
        config = ServeConfig(
            model=ModelFlags(model=str(write_tiny_model(tmp_path / "tiny"))), server=ServerConfig(admin_listen=taken)
        )
        child = Child.start(ChildCommand("front end 0", "photon_grpc.service.processes.frontend", said.fileno()))
        child.send(Begin(config, 0, ("127.0.0.1:0",), admin=taken))
        told = [message async for message in child.messages()]
        assert await child.ended() == CANNOT_START
        child.close()
    said.seek(0)
    assert "Traceback" not in said.read()
    assert [taken in message.message for message in told if isinstance(message, CannotStart)] == [True]


def test_the_public_listener_has_no_admin_service(service: RunningService) -> None:
    with grpc.insecure_channel(service.wait_ready()[0]) as channel, pytest.raises(grpc.RpcError) as caught:
        admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest(), timeout=120)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_replica_without_a_name_has_that_of_its_host_and_process(service: RunningService, admin: Any) -> None:
    _, call = admin.GetServerInfo.with_call(admin_pb2.GetServerInfoRequest(), timeout=120)
    named = f"{host.gethostname()}-{service.process.pid}"
    assert dict(call.trailing_metadata())["x-photon-replica"] == named


def test_the_load_is_true_under_work_and_at_idle(admin: Any, inference: Any) -> None:
    call = inference.StreamGenerate(request("busy"))
    next(call)
    wait_until(lambda: load_of(admin).running_requests == 1 and load_of(admin).owned_kv_blocks > 0, "a busy load")
    call.cancel()
    wait_until(lambda: load_of(admin).running_requests == load_of(admin).owned_kv_blocks == 0, "an idle load")
    wait_until(lambda: load_of(admin).output_tokens_per_second == 0, "no rate")
    idle = load_of(admin)
    assert (idle.output_tokens_per_second, idle.queued_requests, idle.kv_utilization) == (0, 0, 0)
    info = admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=120)
    assert idle.free_kv_blocks + idle.cached_kv_blocks == info.total_kv_blocks == 512


def test_aborted_requests_end_with_and_without_output(admin: Any, inference: Any) -> None:
    running = inference.StreamGenerate(request("runs"))
    next(running)
    waiting = inference.Generate.future(request("waits"))
    wait_until(lambda: load_of(admin).queued_requests == 1, "a queue")
    ids = admin.AbortRequests(admin_pb2.AbortRequestsRequest(request_ids=["waits", "nobody's"]), timeout=120)
    assert ids.aborted_request_ids == ["waits"]
    with pytest.raises(grpc.RpcError) as caught:
        waiting.result(timeout=120)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ABORTED, "ABORTED_BY_ADMIN")
    ids = admin.AbortRequests(admin_pb2.AbortRequestsRequest(all=True), timeout=120)
    assert ids.aborted_request_ids == ["runs"]
    *_, last = running
    assert last.deltas[-1].finish.reason == pb.FINISH_REASON_ABORTED
    assert running.code() is grpc.StatusCode.OK


def test_resetting_forgets_prefixes(admin: Any, inference: Any) -> None:
    def cached() -> int:
        answer = inference.Generate(request("", "a prompt of some blocks " * 10, 1), timeout=120)
        return int(answer.usage.cached_prompt_tokens)

    cached()
    assert cached() > 0
    assert admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=120).freed_blocks > 0
    wait_until(lambda: load_of(admin).cached_kv_blocks == 0, "a load without prefixes")
    assert cached() == 0


def test_drain_ends_the_service_and_the_signal_that_follows_hurries_nothing(
    service: RunningService, socket: Path, admin: Any, inference: Any
) -> None:
    running = inference.StreamGenerate(request("long"))
    next(running)
    watch = admin.WatchLoad(admin_pb2.WatchLoadRequest())
    next(watch)
    drain = admin.Drain.future(admin_pb2.DrainRequest(timeout={"seconds": 1}))
    wait_until(lambda: any("draining" in line for line in service.lines), "the drain")
    service.process.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as caught:
        inference.Generate(request("late"), timeout=120)
    assert reason_of(caught.value) == "DRAINING"
    assert load_of(admin).running_requests == 1
    assert drain.result(timeout=120).remaining_requests == 1
    with pytest.raises(grpc.RpcError) as caught:
        list(running)
    assert reason_of(caught.value) == "DRAINING"
    list(watch)
    assert watch.code() is grpc.StatusCode.OK
    assert service.process.wait(120) == 0
    assert not socket.exists()
