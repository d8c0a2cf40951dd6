"""Addresses, drain and limits: the server as its operator sees it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest

from photon_grpc.config.flags import ServerConfig
from photon_grpc.errors import ConfigError, Draining
from photon_grpc.frontend.output.update import OutputDelta, Update
from photon_grpc.server.server import Server
from photon_grpc.server.standard import health
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.server.failing import failure, info_of
from tests.server.fake_frontend import ASK, HELLO, LAST, FakeFrontend, for_ever, raw, serving, until


def make(frontend: FakeFrontend | None = None) -> Server:
    return Server(frontend or FakeFrontend(), config=ServerConfig())  # type: ignore[arg-type]


async def generates(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        return (await inference_pb2_grpc.InferenceServiceStub(channel).Generate(ASK)).outputs[0].text == "hello!"


async def refusal(address: str) -> str:
    with pytest.raises(ConfigError) as caught:
        await make().start((address,), reuse_port=False)
    assert caught.value.field == "listen"
    assert address in caught.value.message
    return caught.value.message


async def test_several_addresses_and_the_port_that_was_chosen(tmp_path: Path) -> None:
    server = make()
    path = f"unix:{tmp_path}/s"
    bound = await server.start(("127.0.0.1:0", path, "localhost:0"), reuse_port=False)
    assert bound[1] == path
    assert bound[0].startswith("127.0.0.1:")
    assert not bound[0].endswith(":0")
    for address in bound:
        assert await generates(address)
    await server.drain_and_stop(0)


async def test_a_port_in_use_is_refused(address: str) -> None:
    assert "in use" in await refusal(address)
    assert await generates(address)


async def test_a_port_may_be_shared_on_purpose_only() -> None:
    first, second, third = make(), make(), make()
    (address,) = await first.start(("127.0.0.1:0",), reuse_port=True)
    assert await second.start((address,), reuse_port=True) == (address,)
    with pytest.raises(ConfigError):
        await third.start((address,), reuse_port=False)
    for server in (first, second):
        await server.drain_and_stop(0)


async def test_a_failed_start_leaves_nothing_bound(address: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ConfigError):
        await make().start((free, address), reuse_port=False)
    server = make()
    assert await server.start((free,), reuse_port=False) == (free,)
    await server.drain_and_stop(0)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("localhost", "HOST:PORT"),
        ("", "HOST:PORT"),
        (":50051", "HOST:PORT"),
        ("127.0.0.1:65536", "HOST:PORT"),
        ("127.0.0.1:http", "HOST:PORT"),
        ("dns:///127.0.0.1:1", "HOST:PORT"),
        ("192.0.2.1:0", "not one of this machine"),
        ("no-such-host.invalid:0", "host name"),
        ("unix:", "empty"),
        ("unix:/no/such/directory/s", "does not exist"),
        ("unix:/tmp/" + "x" * 200, "107 bytes"),
    ],
)
async def test_addresses_that_cannot_be_bound_say_why(address: str, why: str) -> None:
    assert why in await refusal(address)


async def test_a_directory_that_this_user_may_not_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != str(tmp_path))  # which nothing keeps from root
    assert "not writable" in await refusal(f"unix:{tmp_path}/s")


async def test_a_live_unix_socket_is_not_replaced(tmp_path: Path) -> None:
    path = f"unix:{tmp_path}/s"
    server = make()
    await server.start((path,), reuse_port=False)
    assert "another server" in await refusal(path)
    assert await generates(path)
    await server.drain_and_stop(0)


async def test_a_socket_file_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen(1)
    assert path.exists()
    server = make()
    assert await server.start((f"unix:{path}",), reuse_port=False) == (f"unix:{path}",)
    assert await generates(f"unix:{path}")
    await server.drain_and_stop(0)


async def test_a_file_that_is_not_a_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    assert "not a socket" in await refusal(f"unix:{path}")
    assert path.read_text() == "data"


async def test_three_slashes_are_the_same_path(tmp_path: Path) -> None:
    server = make()
    assert await server.start((f"unix://{tmp_path}/s",), reuse_port=False) == (f"unix:{tmp_path}/s",)
    assert (tmp_path / "s").is_socket()
    await server.drain_and_stop(0)


async def test_a_drain_lets_running_calls_finish_and_refuses_new_ones() -> None:
    frontend, server = FakeFrontend(), None
    go_on = asyncio.Event()
    frontend.script = [HELLO[0], go_on.wait, LAST]
    server = make(frontend)
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        running = stub.StreamGenerate(ASK)
        assert (await running.read()).sequence == 1
        stopping = asyncio.create_task(server.drain_and_stop(60))
        await until(lambda: bool(frontend.drained_for_s))
        assert frontend.drained_for_s == [60]
        error = await failure(stub.Generate(ASK))
        assert (error.code(), info_of(error).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        request = health.CheckRequest(service=health.READINESS).SerializeToString()
        status = health.CheckResponse.FromString(await raw(channel, "/grpc.health.v1.Health/Check")(request))
        assert status.status == 2
        go_on.set()
        assert (await running.read()).deltas[0].text == "!"
        assert await running.read() is grpc.aio.EOF
        assert await running.code() is grpc.StatusCode.OK
        await stopping
    with pytest.raises(grpc.aio.AioRpcError):
        await generates(address)


async def test_calls_that_outlive_the_drain_end_with_a_reason() -> None:
    """The front end fails the remaining requests, and the stop leaves time for their status to arrive."""
    frontend = FakeFrontend()
    late = asyncio.Event()
    frontend.script = [HELLO[0], late.wait, Draining("the server stopped before it was done")]
    server = make(frontend)
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    async with grpc.aio.insecure_channel(address) as channel:
        running = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(ASK)
        reading = asyncio.create_task(failure(running))
        await until(lambda: bool(frontend.streams))
        asyncio.get_running_loop().call_later(0.2, late.set)
        stopping = asyncio.create_task(server.drain_and_stop(0.1))
        error = await reading
        assert (error.code(), info_of(error).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await stopping


async def test_stopping_twice_has_no_further_effect() -> None:
    server = make()
    await server.drain_and_stop(0)
    await server.start(("127.0.0.1:0",), reuse_port=False)
    await asyncio.gather(server.drain_and_stop(0), server.drain_and_stop(0))


async def test_the_message_limit_is_the_configured_one() -> None:
    async with (
        serving(FakeFrontend(), config=ServerConfig(max_message_size=1_000_000)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Generate(pb.GenerateRequest(text="x" * 990_000))
        for compression in (None, grpc.Compression.Gzip):
            error = await failure(stub.Generate(pb.GenerateRequest(text="x" * 1_000_000), compression=compression))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_more_than_gRPCs_default_limit_is_accepted(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x" * (20 << 20)))


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    frontend = FakeFrontend()
    frontend.script = [Update((OutputDelta(0, "x" * 1_000_000),))] * 200
    async with serving(frontend, stall_limit_s=0.2) as address, grpc.aio.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(ASK)
        await call.read()
        await asyncio.wait_for(frontend.streams[0].closed.wait(), 120)
        # Other callers are served as before.
        frontend.script = HELLO
        assert await generates(address)
        # A client that continues to read gets what was written, then the reason for the end.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await asyncio.wait_for(call.read(), 120) is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "read no message for 0.2 s" in caught.value.details()


async def test_a_slow_model_is_not_mistaken_for_a_slow_reader() -> None:
    frontend = FakeFrontend()
    frontend.script = [HELLO[0], lambda: asyncio.sleep(0.5), LAST]
    async with serving(frontend, stall_limit_s=0.05) as address, grpc.aio.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(ASK)
        assert len([message async for message in call]) == 2


async def test_a_waiting_stream_costs_the_others_nothing(address: str, frontend: FakeFrontend) -> None:
    frontend.script = [for_ever]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        waiting = [stub.StreamGenerate(ASK) for _ in range(200)]
        await until(lambda: len(frontend.streams) == 200)
        frontend.script = HELLO
        assert await generates(address)
        for call in waiting:
            call.cancel()
        await until(lambda: all(stream.closed.is_set() for stream in frontend.streams))
