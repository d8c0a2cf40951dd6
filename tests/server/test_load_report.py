"""ORCA load reports: in the trailers of every call, on their own streams, and in gRPC's balancing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from photon_grpc import errors
from photon_grpc.access.key_ring import KeyRing
from photon_grpc.config.resolve import resolve
from photon_grpc.core.stats import Load
from photon_grpc.errors import ConfigError, ModelLoading
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import CallRules
from photon_grpc.server.server import Server
from photon_grpc.server.standard import load_report
from photon_grpc.server.standard.load_report import OrcaLoadReport, OrcaLoadReportRequest
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.fake_engine import FACTS
from tests.server.failing import failure, info_of
from tests.server.fake_frontend import ASK, GENERATE, STREAM_GENERATE, FakeFrontend, for_ever, raw, serving, until
from tests.server.keys import SECRETS, bearer, write_keys
from tests.server.load_trailer import load_trailer

METHOD = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
BUSY = Load(
    running=2,
    queued=3,
    total_blocks=10,
    owned_blocks=4,
    cached_blocks=6,
    ended_per_s=4.0,
    output_tokens_per_s=50.0,
)


def test_the_load_report_matches_the_published_proto() -> None:
    """The bytes are from the classes of xds-protos 1.85."""
    report = OrcaLoadReport.FromString(
        bytes.fromhex(
            "09000000000000f03f1100000000000000401803220c0a01611100000000000010402a0c0a0162110000000000001440"
            "310000000000001840390000000000001c40420c0a0163110000000000002040490000000000002240"
        )
    )
    assert (report.cpu_utilization, report.mem_utilization, report.rps, report.rps_fractional) == (1, 2, 3, 6)
    assert (report.eps, report.application_utilization) == (7, 9)
    assert (report.request_cost, report.utilization, report.named_metrics) == ({"a": 4}, {"b": 5}, {"c": 8})
    request = OrcaLoadReportRequest.FromString(bytes.fromhex("0a020805120178"))
    assert (request.report_interval.seconds, list(request.request_cost_names)) == (5, ["x"])


def metrics_stream(channel: grpc.aio.Channel, **interval: int) -> Any:
    request = OrcaLoadReportRequest()
    if interval:
        request.report_interval.FromMilliseconds(interval["ms"])
    method = channel.unary_stream(
        METHOD,
        request_serializer=OrcaLoadReportRequest.SerializeToString,
        response_deserializer=OrcaLoadReport.FromString,
    )
    return method(request)


def busy_report() -> Any:
    """Return the report of BUSY if nothing has ended lately: three requests wait for three quarters of a second."""
    return OrcaLoadReport(
        application_utilization=0.75,
        utilization={"kv": 0.4, "seats": 0.25, "queue": 0.75},
        named_metrics={
            "kv_cache_usage_perc": 0.4,
            "num_requests_running": 2,
            "num_requests_waiting": 3,
            "output_tokens_per_s": 50.0,
        },
    )


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load(total_blocks=10, cached_blocks=10, ended_per_s=4.0), 0.0),
        (Load(running=2, total_blocks=10, owned_blocks=4), 0.4),
        (Load(running=6, total_blocks=10, owned_blocks=4), 0.75),
        (Load(running=6, queued=8, total_blocks=10, owned_blocks=4, ended_per_s=4.0), 2.0),
        # The rate was never measured.
        (Load(running=1, queued=1, total_blocks=10, owned_blocks=4), 1.0),
    ],
)
async def test_utilization_is_the_largest_of_blocks_seats_and_seconds_in_the_queue(
    address: str, frontend: FakeFrontend, load: Load, expected: float
) -> None:
    frontend.load = load
    report = await load_trailer(address, GENERATE, ASK.SerializeToString())
    assert report is not None
    assert report.application_utilization == expected
    assert max(report.utilization.values()) == min(expected, 1.0)
    assert (report.named_metrics["num_requests_waiting"], report.cpu_utilization) == (load.queued, 0)


async def test_every_call_ends_with_a_load_report(address: str, frontend: FakeFrontend) -> None:
    frontend.load = BUSY
    request = ASK.SerializeToString()
    for path, message in (
        (GENERATE, request),
        (STREAM_GENERATE, request),
        ("/photon_grpc.v1.InferenceService/MultiplexGenerate", b""),
        ("/photon_grpc.v1.ModelService/ListModels", b""),
        (GENERATE, b"\xff\xff"),
        (STREAM_GENERATE, b"\xff\xff"),
    ):
        assert (await load_trailer(address, path, message)) == busy_report(), path
    for error in (errors.QueueFull("full"), errors.NumericFailure("nan"), RuntimeError("a defect")):
        for path in (GENERATE, STREAM_GENERATE):
            frontend.refusals = [error]
            assert (await load_trailer(address, path, request)) == busy_report()
    frontend.script = (*frontend.script[:1], errors.EngineFailure("gone"))
    assert (await load_trailer(address, STREAM_GENERATE, request)) == busy_report()


async def test_a_failed_call_sends_status_and_load_together(
    inference: inference_pb2_grpc.InferenceServiceStub, frontend: FakeFrontend
) -> None:
    frontend.refusals = [errors.QueueFull("full")]
    trailers = dict((await failure(inference.StreamGenerate(ASK))).trailing_metadata())
    assert {"grpc-status-details-bin", "grpc-retry-pushback-ms", "x-request-id", "x-photon-replica"} == trailers.keys()


async def test_rates_cover_recently_ended_requests(frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(load_report.time, "monotonic", lambda: now_s)
    reports = load_report.LoadReports(frontend)  # type: ignore[arg-type]
    frontend.load = Load(finished=1000, total_blocks=10)
    watch = asyncio.create_task(reports.watch())
    await asyncio.sleep(0)
    watch.cancel()
    assert reports.report().rps_fractional == 0
    now_s = 104.0
    frontend.load = Load(finished=1010, cancelled=4, failed=6, total_blocks=10)
    assert (reports.report().rps_fractional, reports.report().eps) == (5.0, 1.5)
    # A new engine starts at 0.
    frontend.load = Load(finished=1, total_blocks=10)
    assert reports.report().rps_fractional == 0


async def test_without_an_engine_there_is_no_load() -> None:
    class Loading(FakeFrontend):
        facts = property(refused, lambda loading, facts: None)  # type: ignore[assignment]

    async with serving(Loading()) as address:
        assert await load_trailer(address, GENERATE, ASK.SerializeToString()) == OrcaLoadReport()


def refused(frontend: FakeFrontend) -> None:
    raise ModelLoading("loading")


async def test_out_of_band_the_load_comes_at_once_and_every_interval(
    channel: grpc.aio.Channel, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_report, "LEAST_INTERVAL_S", 0.02)
    frontend.load = BUSY
    call = metrics_stream(channel, ms=0)
    assert (await call.read()).application_utilization == 0.75
    frontend.load = Load(total_blocks=10)
    while (report := await call.read()).application_utilization:
        pass
    assert report.application_utilization == 0 and (await call.read()) == report
    call.cancel()


async def test_no_stream_gets_reports_faster_than_the_shortest_interval(channel: grpc.aio.Channel) -> None:
    fast, unset = metrics_stream(channel, ms=1), metrics_stream(channel)
    for call in (fast, unset):
        await call.read()
        silent = asyncio.create_task(call.read())
        assert not (await asyncio.wait([silent], timeout=0.2))[0]
        call.cancel()
        await asyncio.wait([silent])


async def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_report, "MAX_STREAMS", 2)
    async with serving(FakeFrontend()) as address, grpc.aio.insecure_channel(address) as channel:
        await streams_are_bounded(channel)


async def streams_are_bounded(channel: grpc.aio.Channel) -> None:
    calls = [metrics_stream(channel) for _ in range(2)]
    for call in calls:
        await call.read()
    error = await failure(metrics_stream(channel))
    assert (error.code(), info_of(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    calls[0].cancel()
    for _ in range(6000):
        with contextlib.suppress(grpc.aio.AioRpcError):
            if await metrics_stream(channel).read() is not grpc.aio.EOF:
                break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("the place of the cancelled stream stayed taken")


async def test_a_drain_ends_the_streams(frontend: FakeFrontend) -> None:
    server = Server(frontend, config=resolve({}, {}).config.server)  # type: ignore[arg-type]
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    async with grpc.aio.insecure_channel(address) as channel:
        call = metrics_stream(channel)
        await call.read()
        await server.drain_and_stop(30)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_the_load_is_not_sent_without_a_key(tmp_path: Path, frontend: FakeFrontend) -> None:
    frontend.load = BUSY
    ring = KeyRing(str(write_keys(tmp_path / "keys.toml")))
    async with (
        serving(frontend, rules=CallRules(FailureLog(), keys=ApiKeys(ring, ("health",)))) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for path in (GENERATE, METHOD, "/grpc.health.v1.Health/Check"):
            assert await load_trailer(address, path) is None
        (_, value), *_ = bearer(SECRETS["gen"])
        request = ASK.SerializeToString()
        assert await load_trailer(address, GENERATE, request, authorization=value) == busy_report()
        any_key = raw(channel, METHOD, stream=True)(b"", metadata=bearer(SECRETS["mod"]))
        assert OrcaLoadReport.FromString(await any_key.read()).application_utilization == 0.75
        any_key.cancel()
    async with (
        serving(frontend, rules=CallRules(FailureLog(), keys=ApiKeys(ring, ("load-reports",)))) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert (await metrics_stream(channel).read()).application_utilization == 0.75


async def test_the_replica_is_named_with_the_first_message_or_the_end(frontend: FakeFrontend) -> None:
    async with (
        serving(frontend, rules=CallRules(FailureLog(), "pod-7")) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for call in (stub.Generate(ASK), stub.StreamGenerate(ASK)):
            assert dict(await call.initial_metadata())["x-photon-replica"] == "pod-7"
        check = raw(channel, "/grpc.health.v1.Health/Check")(b"")
        await check
        assert dict(await check.trailing_metadata())["x-photon-replica"] == "pod-7"
        frontend.refusals = [errors.QueueFull("full")]
        call = stub.StreamGenerate(ASK)
        await call.code()
        assert "x-photon-replica" not in dict(await call.initial_metadata())
        assert dict(await call.trailing_metadata())["x-photon-replica"] == "pod-7"
        frontend.script = [for_ever]
        call = stub.StreamGenerate(ASK)
        early = asyncio.create_task(call.initial_metadata())
        await until(lambda: len(frontend.streams) == 3)
        assert not (await asyncio.wait([early], timeout=0.1))[0]
        call.cancel()


@pytest.mark.parametrize("wrong", ["a\nb", "é", "x" * 129])
def test_a_replica_id_that_is_invalid_as_metadata_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="PHOTON_REPLICA_ID"):
        resolve({}, {"PHOTON_REPLICA_ID": wrong})


@pytest.fixture
async def two_servers() -> AsyncIterator[tuple[list[FakeFrontend], list[str]]]:
    async with AsyncExitStack() as stack:
        frontends = [FakeFrontend(), FakeFrontend()]
        addresses = [
            await stack.enter_async_context(serving(each, rules=CallRules(FailureLog(), str(number))))
            for number, each in enumerate(frontends)
        ]
        yield frontends, addresses


def weighted(**more: Any) -> list[tuple[str, Any]]:
    """Return the options of a channel that balances by load."""
    policy = {"blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s", **more}
    config = json.dumps({"loadBalancingConfig": [{"weighted_round_robin": policy}]})
    return [("grpc.service_config", config), ("grpc.use_local_subchannel_pool", 1)]


@pytest.mark.parametrize("out_of_band", [False, True], ids=["trailers", "out-of-band"])
async def test_grpcs_weighted_round_robin_goes_where_there_is_room(
    two_servers: tuple[list[FakeFrontend], list[str]], monkeypatch: pytest.MonkeyPatch, out_of_band: bool
) -> None:
    """The shares of calls follow 1 / utilization: 0.75 and 0.25. Each way of reporting is enough by itself."""
    monkeypatch.setattr(load_report.LoadReports, "_rates", lambda reports, now: (10.0, 0.0))
    monkeypatch.setattr(load_report, "LEAST_INTERVAL_S", 0.05)
    if out_of_band:
        monkeypatch.setattr(load_report.LoadReports, "trailers", lambda reports: ())
    frontends, addresses = two_servers
    frontends[0].load = Load(running=2, total_blocks=100, owned_blocks=25)
    frontends[1].load = Load(running=6, total_blocks=100, owned_blocks=25)
    options = weighted(enableOobLoadReport=out_of_band, oobReportingPeriod="0.05s")
    async with grpc.aio.insecure_channel("ipv4:" + ",".join(addresses), options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        served = Counter[int]()
        while len(served) < 2:
            served[await replica_of(stub)] += 1
        for _ in range(20):  # until both reports have arrived and the weights use them
            shares = Counter([await replica_of(stub) for _ in range(80)])
            if shares[0] == pytest.approx(60, abs=4):
                break
            await asyncio.sleep(0.5)
        lasting = Counter([await replica_of(stub) for _ in range(80)])
    assert FACTS.max_num_seqs == 8
    assert shares[0] == pytest.approx(60, abs=4)
    assert lasting[0] == pytest.approx(60, abs=4)


async def replica_of(stub: inference_pb2_grpc.InferenceServiceStub) -> int:
    call = stub.Generate(pb.GenerateRequest(text="hi"))
    await call
    return int(str(dict(await call.initial_metadata())["x-photon-replica"]))
