"""Liveness and readiness: Check, Watch, List, as a stock client and as the raw protocol see them."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon_grpc.config.flags import ServerConfig
from photon_grpc.frontend.readiness import State
from photon_grpc.server.server import Server
from photon_grpc.server.standard import health
from tests.server.failing import failure
from tests.server.fake_frontend import FakeFrontend, raw

Status = health_pb2.HealthCheckResponse


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(channel)


def check(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        (State.LOADING, Status.SERVING, Status.NOT_SERVING),
        (State.SERVING, Status.SERVING, Status.SERVING),
        (State.RESTARTING, Status.SERVING, Status.NOT_SERVING),
        (State.DRAINING, Status.SERVING, Status.NOT_SERVING),
        (State.FAILED, Status.NOT_SERVING, Status.NOT_SERVING),
    ],
)
async def test_health_follows_the_front_end(
    stub: health_pb2_grpc.HealthStub,
    channel: grpc.aio.Channel,
    frontend: FakeFrontend,
    state: State,
    live: int,
    ready: int,
) -> None:
    frontend.become(state)
    assert (await stub.Check(check(""))).status == live
    assert (await stub.Check(check(health.READINESS))).status == ready
    listed = health.ListResponse.FromString(await raw(channel, "/grpc.health.v1.Health/List")(b""))
    assert {name: response.status for name, response in listed.statuses.items()} == {"": live, health.READINESS: ready}


async def test_an_unknown_service(stub: health_pb2_grpc.HealthStub) -> None:
    assert (await failure(stub.Check(check("nobody")))).code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(check("nobody"))
    assert (await watch.read()).status == Status.SERVICE_UNKNOWN
    watch.cancel()


async def test_watch_reports_every_lasting_change_once(
    stub: health_pb2_grpc.HealthStub, frontend: FakeFrontend
) -> None:
    frontend.become(State.LOADING)
    watch = stub.Watch(check(health.READINESS))
    assert (await watch.read()).status == Status.NOT_SERVING
    frontend.become(State.SERVING)
    assert (await watch.read()).status == Status.SERVING
    frontend.become(State.SERVING)
    frontend.become(State.RESTARTING)
    assert (await watch.read()).status == Status.NOT_SERVING
    watch.cancel()


async def test_many_watchers_are_notified(stub: health_pb2_grpc.HealthStub, frontend: FakeFrontend) -> None:
    watches = [stub.Watch(check(health.READINESS)) for _ in range(20)]
    for watch in watches:
        assert (await watch.read()).status == Status.SERVING
    frontend.become(State.RESTARTING)
    for watch in watches:
        assert (await watch.read()).status == Status.NOT_SERVING
        watch.cancel()


async def test_an_open_watch_does_not_hold_up_the_stop() -> None:
    server = Server(FakeFrontend(), config=ServerConfig())  # type: ignore[arg-type]
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(check(health.READINESS))
        assert (await watch.read()).status == Status.SERVING
        await server.drain_and_stop(0)
        assert (await watch.read()).status == Status.NOT_SERVING
        # An orderly end, which the stop's grace did not have to force.
        assert await watch.read() is grpc.aio.EOF
        assert await watch.code() is grpc.StatusCode.OK
