"""AdminService on its own listener: admission and methods."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.admin.v1 import admin_pb2 as pb
from photon_grpc.admin.v1 import admin_pb2_grpc
from photon_grpc.config.resolve import resolve
from photon_grpc.core.counts import Counts
from photon_grpc.core.frames import Suspect
from photon_grpc.core.stats import Load
from photon_grpc.errors import ConfigError, EngineRestarting
from photon_grpc.frontend.readiness import State
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.observe.metrics import HANDLED, CallMetrics
from photon_grpc.server.admin_listener import AdminListener
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import CallRules
from tests.frontend.fake_engine import FACTS
from tests.server.failing import failure, info_of
from tests.server.fake_frontend import FakeFrontend, raw, until
from tests.server.keys import SECRETS, bearer, write_keys

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]
METHODS = [f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods]


class Operated:
    def __init__(self, frontend: FakeFrontend, listener: AdminListener, address: str) -> None:
        self.frontend = frontend
        self.listener = listener
        self.address = address
        self.drains: list[float | None] = []


@asynccontextmanager
async def operated(address: str, **options: Any) -> AsyncIterator[Operated]:
    frontend = FakeFrontend()
    drains: list[float | None] = []
    listener = AdminListener(frontend, drain=drains.append, **({"rules": CallRules(FailureLog())} | options))  # type: ignore[arg-type]
    made = Operated(frontend, listener, await listener.start(address))
    made.drains = drains
    try:
        yield made
    finally:
        if not listener._service._is_over.is_set():
            await listener.stop(0)


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Operated]:
    async with operated(f"unix:{tmp_path}/admin.sock") as made:
        yield made


@pytest.fixture
async def admin(replica: Operated) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    async with grpc.aio.insecure_channel(replica.address) as channel:
        await channel.channel_ready()
        yield admin_pb2_grpc.AdminServiceStub(channel)


@pytest.mark.parametrize("name", ["GetServerInfo", "ListQuarantine", "ResetPrefixCache"])
async def test_the_service_answers_under_its_former_name_too(replica: Operated, name: str) -> None:
    async with grpc.aio.insecure_channel(replica.address) as channel:
        answers = [
            await raw(channel, f"/photon_grpc.{package}.AdminService/{name}")(b"") for package in ("admin.v1", "v1")
        ]
    assert answers[0] == answers[1]


async def test_the_socket_is_for_owner_and_group_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with operated(f"unix:{tmp_path}/admin.sock"):
            mode = (tmp_path / "admin.sock").stat().st_mode
            assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o660
        assert os.umask(0) == 0
        assert not (tmp_path / "admin.sock").exists()
    finally:
        os.umask(before)


async def test_a_socket_file_that_a_dead_server_left_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen(1)
    async with operated(f"unix:{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(ConfigError, match="another server"):
            async with operated(f"unix:{path}"):
                pass


async def test_a_port_requires_a_key_with_the_admin_scope(tmp_path: Path) -> None:
    ring = KeyRing(str(write_keys(tmp_path / "keys.toml")))
    async with (
        operated("127.0.0.1:0", rules=CallRules(FailureLog(), keys=ApiKeys(ring, ("health",)))) as replica,
        grpc.aio.insecure_channel(replica.address) as channel,
    ):
        for method in METHODS:
            assert info_of(await failure(raw(channel, method)(b""))).reason == "MISSING_CREDENTIALS"
            for name in ("gen", "mod"):
                error = await failure(raw(channel, method)(b"", metadata=bearer(SECRETS[name])))
                assert info_of(error).reason == "SCOPE_REQUIRED"
        assert not replica.drains and not replica.frontend.orders
        await raw(channel, METHODS[0])(b"", metadata=bearer(SECRETS["adm"]))


async def test_operators_calls_are_counted_by_method_and_status(tmp_path: Path) -> None:
    counts, ring = Counts(), KeyRing(str(write_keys(tmp_path / "keys.toml")))
    async with (
        operated(
            "127.0.0.1:0",
            rules=CallRules(FailureLog(), keys=ApiKeys(ring, ("health",)), counts=CallMetrics(counts)),
        ) as replica,
        grpc.aio.insecure_channel(replica.address) as channel,
    ):
        admin, key = admin_pb2_grpc.AdminServiceStub(channel), bearer(SECRETS["adm"])
        await admin.GetLoad(pb.GetLoadRequest(), metadata=key)
        await failure(admin.GetLoad(pb.GetLoadRequest()))
        await failure(admin.AbortRequests(pb.AbortRequestsRequest(), metadata=key))
        watch = admin.WatchLoad(pb.WatchLoadRequest(), metadata=key)
        await watch.read()
        drain = asyncio.ensure_future(admin.Drain(pb.DrainRequest(), metadata=key))
        await until(lambda: bool(replica.drains))
        await replica.listener.stop(0)
        await drain
    counted = {series.labels: series.values for series in counts.changed() if series.name == HANDLED.name}
    assert counted == {
        ("unary", SERVICE.full_name, "GetLoad", "OK"): (1.0,),
        ("unary", SERVICE.full_name, "GetLoad", "UNAUTHENTICATED"): (1.0,),
        ("unary", SERVICE.full_name, "AbortRequests", "INVALID_ARGUMENT"): (1.0,),
        ("server_stream", SERVICE.full_name, "WatchLoad", "OK"): (1.0,),
        ("unary", SERVICE.full_name, "Drain", "OK"): (1.0,),
    }


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:50052"])
def test_an_admin_port_without_keys_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--api-keys-file"):
        resolve({"admin_listen": address}, {})
    assert resolve({"admin_listen": address, "api_keys_file": "keys.toml"}, {}).config.server.admin_listen == address


async def test_server_info_describes_this_replica(replica: Operated, admin: admin_pb2_grpc.AdminServiceStub) -> None:
    for state in (State.RESTARTING, State.SERVING, State.DRAINING):
        replica.frontend.become(state)
    info = await admin.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.device, info.total_kv_blocks, info.kv_block_tokens) == ("cpu", FACTS.num_blocks, 16)
    assert (info.max_running_requests, info.max_queued_requests, info.max_batched_tokens) == (8, 4, 64)
    assert info.engine_restart_count == 1
    assert info.instance_id and info.version and info.start_time.seconds > 1_600_000_000
    assert (await admin.GetServerInfo(pb.GetServerInfoRequest())).instance_id == info.instance_id


BUSY = Load(
    running=3,
    queued=2,
    queued_prompt_tokens=70,
    total_blocks=10,
    owned_blocks=4,
    cached_blocks=3,
    free_blocks=2,
    limbo_blocks=1,
    step_s=0.0125,
    output_tokens_per_s=50.0,
    prompt_tokens_per_s=10.0,
    prompt_tokens=40,
    cached_prompt_tokens=10,
    preemptions=5,
)


async def test_the_reported_load_is_that_of_the_engine(
    replica: Operated, admin: admin_pb2_grpc.AdminServiceStub
) -> None:
    replica.frontend.load = BUSY
    load = (await admin.GetLoad(pb.GetLoadRequest())).load
    assert (load.running_requests, load.queued_requests, load.queued_prompt_tokens) == (3, 2, 70)
    assert (load.owned_kv_blocks, load.cached_kv_blocks, load.free_kv_blocks) == (4, 3, 2)
    assert (load.kv_utilization, load.prefix_cache_hit_rate) == (0.4, 0.25)
    assert (load.output_tokens_per_second, load.prompt_tokens_per_second) == (50.0, 10.0)
    assert (load.step_duration.ToMicroseconds(), load.preemption_count) == (12_500, 5)
    replica.frontend.load = Load()
    assert (await admin.GetLoad(pb.GetLoadRequest())).load.kv_utilization == 0


async def test_watching_reports_changes_and_the_last_state(
    replica: Operated, admin: admin_pb2_grpc.AdminServiceStub
) -> None:
    request = pb.WatchLoadRequest()
    request.min_interval.FromMilliseconds(30)
    call = admin.WatchLoad(request)
    seen = [(await call.read()).load.running_requests]
    for running in (1, 2, 0):
        replica.frontend.load = Load(running=running)
        seen.append((await call.read()).load.running_requests)
    assert seen == [0, 1, 2, 0]
    silent = asyncio.create_task(call.read())
    assert not (await asyncio.wait([silent], timeout=0.3))[0]
    await replica.listener.stop(0)
    assert await silent is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_abort_takes_names_of_requests_or_all(replica: Operated, admin: admin_pb2_grpc.AdminServiceStub) -> None:
    async def aborted(**fields: Any) -> list[str]:
        return list((await admin.AbortRequests(pb.AbortRequestsRequest(**fields))).aborted_request_ids)

    assert await aborted(request_ids=["x", "y" * 1000]) == ["x"]
    assert await aborted(all=True) == ["a", "b"]
    assert await aborted(request_ids=["y" * 1000]) == []
    assert replica.frontend.orders == [("abort_requests", ("x",)), ("abort_requests", ())]


async def test_the_quarantine_is_listed_and_cleared(replica: Operated, admin: admin_pb2_grpc.AdminServiceStub) -> None:
    replica.frontend.suspects = (
        Suspect("ab" * 16, True, 2, 1_700_000_000.5, 3600.0, "abc", "search"),
        Suspect("cd" * 16, False, 1, 1_600_000_000.0, 600.0),
    )
    first, second = (await admin.ListQuarantine(pb.ListQuarantineRequest())).entries
    assert (first.fingerprint, first.quarantined, first.crash_count) == ("ab" * 16, True, 2)
    assert (first.request_id, first.api_key_name) == ("abc", "search")
    assert (first.crash_time.ToMilliseconds(), first.remaining_time.seconds) == (1_700_000_000_500, 3600)
    assert (second.quarantined, second.request_id, second.api_key_name) == (False, "", "")

    async def cleared(**fields: Any) -> list[str]:
        return list((await admin.ClearQuarantine(pb.ClearQuarantineRequest(**fields))).cleared_fingerprints)

    assert await cleared(fingerprints=["ab" * 16, "y" * 1000]) == ["ab" * 16]
    assert await cleared(all=True) == ["a", "b"]
    assert await cleared(fingerprints=["y" * 1000]) == []
    assert replica.frontend.orders[1:] == [("clear_quarantine", ("ab" * 16,)), ("clear_quarantine", ())]


async def test_a_full_quarantine_fits_into_one_response(
    replica: Operated, admin: admin_pb2_grpc.AdminServiceStub
) -> None:
    one = Suspect("ab" * 16, False, 1 << 31, 1_700_000_000.123456789, 599.123456789, "r" * 128, "k" * 64)
    replica.frontend.suspects = (one,) * 4096
    assert len((await admin.ListQuarantine(pb.ListQuarantineRequest())).entries) == 4096


WRONG: list[Callable[[admin_pb2_grpc.AdminServiceStub], Any]] = [
    lambda admin: admin.AbortRequests(pb.AbortRequestsRequest()),
    lambda admin: admin.AbortRequests(pb.AbortRequestsRequest(request_ids=["x"], all=True)),
    lambda admin: admin.AbortRequests(pb.AbortRequestsRequest(request_ids=["x"] * 257)),
    lambda admin: admin.ClearQuarantine(pb.ClearQuarantineRequest()),
    lambda admin: admin.ClearQuarantine(pb.ClearQuarantineRequest(fingerprints=["x"], all=True)),
    lambda admin: admin.ClearQuarantine(pb.ClearQuarantineRequest(fingerprints=["x"] * 257)),
    lambda admin: admin.Drain(pb.DrainRequest(timeout={"seconds": -1})),
    lambda admin: admin.Drain(pb.DrainRequest(timeout={"seconds": 2**40})),
    lambda admin: admin.Drain(pb.DrainRequest(timeout={"nanos": 2**31 - 1})),
    lambda admin: admin.WatchLoad(pb.WatchLoadRequest(min_interval={"seconds": -1})),
]


@pytest.mark.parametrize("call", WRONG)
async def test_invalid_arguments_are_refused_without_effect(
    replica: Operated, admin: admin_pb2_grpc.AdminServiceStub, call: Callable[..., Any]
) -> None:
    error = await failure(call(admin))
    assert (error.code(), info_of(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert not replica.drains and not replica.frontend.orders


async def test_reset_returns_the_number_of_freed_blocks(
    replica: Operated, admin: admin_pb2_grpc.AdminServiceStub
) -> None:
    assert (await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())).freed_blocks == 42
    replica.frontend.refusals.append(EngineRestarting("the engine is restarting", retry_after_s=1.0))
    error = await failure(admin.ResetPrefixCache(pb.ResetPrefixCacheRequest()))
    assert info_of(error).reason == "ENGINE_RESTARTING"


async def test_drain_answers_every_caller_when_it_is_over(
    replica: Operated, admin: admin_pb2_grpc.AdminServiceStub
) -> None:
    impatient = admin.Drain(pb.DrainRequest(), timeout=0.2)
    assert (await failure(impatient)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    calls = [asyncio.ensure_future(admin.Drain(pb.DrainRequest(timeout={"seconds": 3}))) for _ in range(2)]
    await until(lambda: len(replica.drains) == 3)
    assert replica.drains == [None, 3.0, 3.0]
    assert not any(call.done() for call in calls)
    await replica.listener.stop(7)
    assert [(await call).remaining_requests for call in calls] == [7, 7]
