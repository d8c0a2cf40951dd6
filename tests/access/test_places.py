"""Every table of places has shares: one owner fills it with idle calls, and another is served."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon_grpc.access.held_memory import HeldMemory
from photon_grpc.access.key_ring import KeyRing
from photon_grpc.access.places import AT_WORK, Places, SharedTurns, WaitingPlaces, silent_call
from photon_grpc.admin.v1 import admin_pb2, admin_pb2_grpc
from photon_grpc.config.flags import ServerConfig
from photon_grpc.errors import IdleStreamEvicted, PhotonError, QueueFull
from photon_grpc.frontend.fair_turns import FairTurns
from photon_grpc.gateway.connections import server_state
from photon_grpc.gateway.connections.limits import ConnectionLimits
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server import admin, inference
from photon_grpc.server.admin_listener import AdminListener
from photon_grpc.server.calls import receiver
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import CallRules
from photon_grpc.server.server import Server
from photon_grpc.server.standard import health, load_report, reflection
from photon_grpc.server.standard.load_report import OrcaLoadReport, OrcaLoadReportRequest
from photon_grpc.server.wire import descriptors
from photon_grpc.service.endpoints import http as http_endpoint
from photon_grpc.service.endpoints.http import HttpEndpoint, Page
from photon_grpc.service.processes import encoder_client
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.gateway.echo_server import EchoApp, connect, get, opened, post
from tests.server.failing import failure, info_of, trailer
from tests.server.fake_frontend import ASK, GENERATE, FakeFrontend, serving, until
from tests.server.keys import bearer, block, write_keys

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = bearer("secret of the first"), bearer("secret of the second")
#: Replaces the real limit, on which the mechanism does not depend.
FEW = 3
WATCH = health_pb2.HealthCheckRequest()


# --- one table -------------------------------------------------------------------------------------------------------


class Held:
    """A holder for tests: idle since `since_s`, or at work if that is None."""

    def __init__(self, since_s: float | None = 0.0) -> None:
        self.since_s = since_s
        self.error: PhotonError | None = None

    def idle_since_s(self) -> float | None:
        return self.since_s

    def evict(self, error: PhotonError) -> None:
        self.error = error


def filled(places: Places, owner: str, *since_s: float | None) -> list[Held]:
    held = [Held(each) for each in since_s]
    for each in held:
        places.take(owner, each)
    return held


def test_the_longest_idle_place_of_the_owner_with_the_most_is_given_up() -> None:
    places = Places("things", 5, oldest_first=False)
    (other,) = filled(places, "b", 0.0)
    most = filled(places, "a", 4.0, None, 2.0, 3.0)
    places.take("c", Held())
    assert [each.error is not None for each in most] == [False, False, True, False] and other.error is None
    assert isinstance(most[2].error, IdleStreamEvicted) and "5 things" in most[2].error.message
    assert places.size == 5


def test_an_owner_with_the_most_gives_up_its_own_place() -> None:
    places = Places("things", 4, oldest_first=False)
    (other,) = filled(places, "b", 0.0)
    own = filled(places, "a", 2.0, 1.0, 3.0)
    places.take("a", Held())
    assert [each.error is not None for each in own] == [False, True, False] and other.error is None


def test_no_place_is_given_up_for_an_owner_that_would_hold_more() -> None:
    places = Places("things", 5)
    fewer = filled(places, "b", 0.0, 0.0)
    filled(places, "a", None, None, None)
    with pytest.raises(QueueFull) as refused:
        places.take("a", Held())
    assert (refused.value.needed, refused.value.limit) == (6, 5) and not any(each.error for each in fewer)
    # An owner without places gets one from the next owner that holds more than one.
    places.take("c", Held())
    assert sum(each.error is not None for each in fewer) == 1


def test_working_entries_keep_their_places() -> None:
    places = Places("things", 2)
    filled(places, "a", None, None)
    with pytest.raises(QueueFull) as refused:
        places.take("b", Held())
    assert "2 things are open; the limit is 2" in refused.value.message


def test_a_place_is_kept_for_a_while_between_equals_and_within_one_owner() -> None:
    """Otherwise owners that return at once would evict each other endlessly."""
    places = Places("things", 2, least_idle_s=1000.0)
    now_s = time.monotonic()
    filled(places, "a", now_s - 1)
    (old,) = filled(places, "b", now_s - 1001)
    places.take("c", Held(now_s))
    assert old.error is not None
    with pytest.raises(QueueFull):
        places.take("d", Held(now_s))
    with pytest.raises(QueueFull):
        places.take("a", Held(now_s))
    unequal = Places("things", 2, least_idle_s=1000.0)
    both = filled(unequal, "a", now_s, now_s)
    unequal.take("b", Held(now_s))
    assert [each.error is not None for each in both].count(True) == 1


def test_sizes_add_up_and_nothing_is_ended_without_effect() -> None:
    places = WaitingPlaces("bytes", 100, own_make_room=False)
    large, small = Held(), Held()
    places.take("a", large, 60)
    places.take("a", small, 30)
    with pytest.raises(QueueFull):
        places.take("b", Held(), 99)
    with pytest.raises(QueueFull):
        places.take("a", Held(), 20)
    assert large.error is None and small.error is None
    place = places.take("b", Held(), 60)
    assert isinstance(large.error, QueueFull) and large.error.retry_after_s and places.size == 90
    places.leave(place)
    places.leave(place)
    assert places.size == 30
    with Places("bytes", 1).take("a", Held(), 1000):  # alone, anything
        pass


async def test_a_notified_call_ends_whatever_it_awaits() -> None:
    places = Places("calls", 1)

    async def call() -> None:
        with silent_call(places, "a"):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    places.take("b", Held())
    with pytest.raises(IdleStreamEvicted):
        await task
    cancelled = asyncio.create_task(call())
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert places.size == 0


async def test_owners_take_turns_and_the_last_are_reserved() -> None:
    turns = SharedTurns(4, WaitingPlaces("calls", 100), num_reserved=1)
    begun: list[str] = []

    async def work(owner: str) -> None:
        await turns.take(owner)
        begun.append(owner)

    tasks = [asyncio.create_task(work("a")) for _ in range(6)]
    await asyncio.sleep(0)
    assert begun == ["a"] * 3 and turns.num_free == 1
    tasks += [asyncio.create_task(work(owner)) for owner in ("b", "b")]
    await asyncio.sleep(0)
    assert begun == [*"aaab"]
    for owner in "aab":
        turns.give_back(owner)
        await asyncio.sleep(0)
    assert begun == [*"aaababa"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns.waiting.size == 0 and not turns.owners_waiting()


# --- all tables ------------------------------------------------------------------------------------------------------


class Stage:
    """A server and an AdminService with two keys."""

    def __init__(self, server: Server, operators: AdminListener, address: str, admin_address: str) -> None:
        self.server = server
        self.operators = operators
        self.channel = grpc.aio.insecure_channel(address)
        self.admin = admin_pb2_grpc.AdminServiceStub(grpc.aio.insecure_channel(admin_address))
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)


@contextlib.asynccontextmanager
async def staged(path: Path) -> AsyncIterator[Stage]:
    keys = (block("first", "secret of the first"), block("second", "secret of the second"))
    ring = KeyRing(str(write_keys(path / "keys.toml", *keys)))
    rules = CallRules(FailureLog(), keys=ApiKeys(ring, ("none",)))
    frontend: Any = FakeFrontend()
    server = Server(frontend, config=ServerConfig(), rules=rules)
    operators = AdminListener(frontend, drain=lambda timeout_s: None, rules=rules)
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    stage = Stage(server, operators, address, await operators.start("127.0.0.1:0"))
    try:
        yield stage
    finally:
        await stage.channel.close()
        await server.drain_and_stop(0)
        await operators.stop(0)


async def evicted(call: Any) -> None:
    """Check that the call has ended with a status that gRPC does not retry."""
    error = await failure(call)
    assert (error.code(), info_of(error).reason) == (grpc.StatusCode.UNAVAILABLE, "IDLE_STREAM_EVICTED")
    assert trailer(error, "grpc-retry-pushback-ms") == "-1"


async def silence(*_: object) -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def multiplexed(stage: Stage) -> None:
    await streams_make_room(
        stage.server._inference.places, lambda key: stage.inference.MultiplexGenerate(metadata=key), error_code
    )


async def error_code(call: Any) -> Any:
    await call.write(pb.MultiplexGenerateRequest())
    return (await call.read()).items[0].error.code


async def load_reports(stage: Stage) -> None:
    method = stage.channel.unary_stream(
        f"/{descriptors.LOAD_REPORTS}/StreamCoreMetrics",
        OrcaLoadReportRequest.SerializeToString,
        OrcaLoadReport.FromString,
    )
    await streams_make_room(
        stage.server._orca.places, lambda key: method(OrcaLoadReportRequest(), metadata=key), next_message
    )


async def watches(stage: Stage) -> None:
    stub = health_pb2_grpc.HealthStub(stage.channel)
    await streams_make_room(stage.server._health.places, lambda key: stub.Watch(WATCH, metadata=key), next_message)


async def reflected(stage: Stage) -> None:
    method = stage.channel.stream_stream(f"/{descriptors.REFLECTION[0]}/ServerReflectionInfo")
    listing = b"\x3a\x01*"

    async def question() -> AsyncIterator[bytes]:
        yield listing

    def call(key: Any) -> Any:
        return method(silence() if key is FIRST else question(), metadata=key)

    await streams_make_room(stage.server._reflecting, call, next_message)


async def operated(stage: Stage) -> None:
    await streams_make_room(
        stage.operators._service.places,
        lambda key: stage.admin.WatchLoad(admin_pb2.WatchLoadRequest(), metadata=key),
        next_message,
    )
    assert await stage.admin.ListQuarantine(admin_pb2.ListQuarantineRequest(), metadata=SECOND) is not None


async def next_message(call: Any) -> Any:
    message = await call.read()
    assert message is not grpc.aio.EOF
    return message


async def streams_make_room(
    places: Places, open_call: Callable[[Any], Any], served: Callable[[Any], Awaitable[Any]]
) -> None:
    places.limit = FEW
    calls = []
    for number in range(FEW):
        calls.append(open_call(FIRST))
        await until(lambda number=number: places.size == number + 1)
    assert await served(open_call(SECOND))
    await evicted(calls[0])
    assert not any(call.done() for call in calls[1:]) and places.size <= FEW


async def received(stage: Stage) -> None:
    method = stage.channel.stream_unary(GENERATE)
    held = [method(silence(), metadata=FIRST) for _ in range(2 * receiver.MAX_RECEIVING)]
    turns = stage.server._guard._receiver.turns
    await until(lambda: turns.waiting.size > 0)
    for _ in range(3):
        assert await stage.inference.Generate(ASK, metadata=SECOND)
    assert not any(call.done() for call in held)


async def turns_make_room(turns: SharedTurns, *sizes: int) -> None:
    """Fill the waiting places of `turns`, whose only turn is taken, with `sizes`, and check who makes room."""
    await turns.take("somebody")
    waiting = [asyncio.create_task(turns.take("first", size)) for size in sizes]
    await asyncio.sleep(0)
    other = asyncio.create_task(turns.take("second", sizes[0]))
    with pytest.raises(QueueFull):
        await waiting[0]
    assert not any(task.done() for task in (*waiting[1:], other))
    turns.give_back("somebody")
    await waiting[1]
    turns.give_back("first")
    await asyncio.wait_for(other, 120)  # before the first one's others
    assert not waiting[2].done()
    waiting[2].cancel()


async def waiting_to_send(stage: Stage) -> None:
    turns = receiver.MessageReceiver(max_receiving=1).turns
    turns.waiting.limit = FEW
    turns._is_newest_first = False
    await turns_make_room(turns, 1, 1, 1)


async def waiting_to_be_parsed(stage: Stage) -> None:
    await turns_make_room(receiver.MessageReceiver(max_unparsed_bytes=90)._unparsed, 30, 30, 30)


async def waiting_to_be_encoded(stage: Stage) -> None:
    await encoded(FairTurns(1, "inputs", max_jobs=4, max_bytes=2**20))


async def bytes_waiting_to_be_encoded(stage: Stage) -> None:
    await encoded(FairTurns(1, "inputs", max_jobs=100, max_bytes=400))


async def encoded(turns: FairTurns) -> None:
    begun: list[str] = []
    gates = {owner: asyncio.Event() for owner in ("first", "second")}

    async def job(owner: str) -> None:
        async with turns.turn(owner, 100):
            begun.append(owner)
            await gates[owner].wait()

    tasks = [asyncio.create_task(job("first")) for _ in range(4)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(job("second")))
    with pytest.raises(QueueFull):
        await tasks[3]
    assert begun == ["first"]
    gates["first"].set()
    await until(lambda: len(begun) == 2)
    assert begun == ["first", "second"]  # before the first one's others
    gates["second"].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == ["first", "second", "first", "first"] and not len(turns)


async def held_by_messages(stage: Stage) -> None:
    held_bytes = 0
    reading = Places("reflection streams", 10), Places("calls of MultiplexGenerate", 10, oldest_first=False)
    received = receiver.MessageReceiver(reading, memory=HeldMemory(lambda: held_bytes))
    hostile, busy, small = Held(1.0), Held(None), Held(5.0)
    for held in (hostile, busy):
        reading[1].take("first", held)
    reading[1].take("second", small)
    received._schedule_check()
    held_bytes = receiver.MAX_HELD_BYTES + 1
    await until(lambda: hostile.error is not None)
    assert small.error is None and busy.error is None
    held_bytes = 0
    await until(lambda: not received.turns.is_scarce)
    assert small.error is None and busy.error is None
    # The limit of memory holds even if nothing is idle.
    small.since_s = None
    held_bytes = receiver.MAX_HELD_BYTES + 1
    await until(lambda: busy.error is not None or small.error is not None)


async def scraped(stage: Stage) -> None:
    endpoint = HttpEndpoint({"/ready": lambda accept: Page(b"yes")})
    endpoint.places.limit = FEW
    port = int((await endpoint.start("127.0.0.1:0")).rpartition(":")[2])
    silent = []
    for number in range(FEW):
        silent.append(await asyncio.open_connection("127.0.0.1", port))
        await until(lambda number=number: endpoint.places.size == number + 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    writer.write(b"GET /ready HTTP/1.1\r\n\r\n")
    assert (await reader.read()).endswith(b"yes")
    with contextlib.suppress(ConnectionError):
        assert await silent[0][0].read() == b""
    endpoint.close()
    for _, each in (*silent, (reader, writer)):
        each.close()


async def connected_over_http(stage: Stage) -> None:
    async with opened(EchoApp(), limits=ConnectionLimits(max_connections=FEW)) as port:
        silent = [await connect(port) for _ in range(FEW)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        writer.write(get())
        assert b"200" in await reader.readline()
        for _, each in (*silent, (reader, writer)):
            each.close()


async def posting(stage: Stage) -> None:
    """The bodies of one host that lack their last byte give way to a body of another host once they are idle."""
    limits = ConnectionLimits(max_held_bytes=FEW * 65536)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_state, "_LEAST_IDLE_S", 0.0)
        async with opened(EchoApp(), limits=limits) as port:
            silent = [await connect(port) for _ in range(FEW)]
            for _, writer in silent:
                writer.write(post(b"x" * 65536)[:-1])
                await asyncio.sleep(0.05)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            writer.write(post(b"x" * 65536))
            assert b"200" in await reader.readline()
            for _, each in (*silent, (reader, writer)):
                each.close()


#: Name in the document -> the limit, and a test in which one owner fills the table and another is served.
TABLES: dict[str, tuple[int, Callable[[Stage], Awaitable[None]]]] = {
    "calls of MultiplexGenerate": (inference.MAX_MULTIPLEX_CALLS, multiplexed),
    "streams of load reports": (load_report.MAX_STREAMS, load_reports),
    "health watches": (health.MAX_WATCHES, watches),
    "reflection streams": (reflection.MAX_STREAMS, reflected),
    "calls of operators": (admin.MAX_CALLS, operated),
    "messages received at a time": (receiver.MAX_RECEIVING, received),
    "calls that wait to send their message": (receiver.MAX_WAITING, waiting_to_send),
    "bytes of messages that wait to be parsed": (receiver.MAX_UNPARSED_BYTES, waiting_to_be_parsed),
    "inputs that wait to be encoded": (encoder_client._MAX_JOBS, waiting_to_be_encoded),
    "bytes that wait to be encoded": (encoder_client._MAX_JOBS_BYTES, bytes_waiting_to_be_encoded),
    "bytes held by messages that arrive": (receiver.MAX_HELD_BYTES, held_by_messages),
    "connections for metrics": (http_endpoint.MAX_CONNECTIONS, scraped),
    "HTTP connections": (ConnectionLimits().max_connections, connected_over_http),
    "bytes of bodies": (ConnectionLimits().max_held_bytes, posting),
}
#: Limits of turns and of the common memory, which have no Places.
OTHERS = {
    "messages received at a time",
    "inputs that wait to be encoded",
    "bytes that wait to be encoded",
    "bytes held by messages that arrive",
}


@pytest.mark.parametrize("counted", TABLES)
async def test_silent_calls_of_one_owner_leave_others_served(counted: str, tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await TABLES[counted][1](stage)


def test_the_document_names_all_tables_and_their_limits() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text().split("## Places")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)`[^|]* \| ([\d,]+) \|", text, re.MULTILINE)
    assert {name: int(limit.replace(",", "")) for name, limit in rows} == {
        name: limit for name, (limit, _) in TABLES.items()
    }


def test_every_table_of_the_source_is_among_them() -> None:
    sources = [path.read_text() for path in (ROOT / "photon_grpc").rglob("*.py")]
    calls = [
        node
        for source in sources
        if "Places(" in source
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Places")
    ]
    assert {ast.literal_eval(call.args[0]) for call in calls} == TABLES.keys() - OTHERS


# --- as callers see it -----------------------------------------------------------------------------------------------


async def test_without_keys_hosts_are_the_owners(tmp_path: Path) -> None:
    """All callers over a Unix socket count as one."""
    server = Server(FakeFrontend(), config=ServerConfig())  # type: ignore[arg-type]
    server._inference.places.limit = FEW
    addresses = await server.start(("127.0.0.1:0", f"unix:{tmp_path}/s"), reuse_port=False)
    async with grpc.aio.insecure_channel(addresses[0]) as port, grpc.aio.insecure_channel(addresses[1]) as socket:
        silent = [inference_pb2_grpc.InferenceServiceStub(socket).MultiplexGenerate() for _ in range(FEW)]
        await until(lambda: server._inference.places.size == FEW)
        assert await error_code(inference_pb2_grpc.InferenceServiceStub(port).MultiplexGenerate())
        assert sum([call.done() for call in silent]) <= 1
    await server.drain_and_stop(0)


async def test_the_owner_with_the_most_loses_a_call_but_not_one_used_lately() -> None:
    server = Server(FakeFrontend(), config=ServerConfig())  # type: ignore[arg-type]
    server._inference.places.limit = 2
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        used, idle = stub.MultiplexGenerate(), stub.MultiplexGenerate()
        await until(lambda: server._inference.places.size == 2)
        assert await error_code(idle) and await error_code(used)
        assert await error_code(stub.MultiplexGenerate())
        assert await idle.code() is grpc.StatusCode.UNAVAILABLE
        assert await error_code(used)
    await server.drain_and_stop(0)


async def test_when_memory_runs_out_silent_streams_end_and_calls_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_bytes = 0
    monkeypatch.setattr(receiver, "HeldMemory", lambda: HeldMemory(lambda: held_bytes))
    async with serving(FakeFrontend()) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        reflecting = channel.stream_stream(f"/{descriptors.REFLECTION[0]}/ServerReflectionInfo")(silence())
        shared = stub.MultiplexGenerate()
        await asyncio.sleep(0.05)
        held_bytes = 2 * receiver.MAX_HELD_BYTES
        await evicted(reflecting)
        await evicted(shared)
        await asyncio.wait_for(asyncio.gather(*[stub.Generate(ASK) for _ in range(20)]), 120)


async def test_a_slow_message_survives_a_crowd_of_another_owner() -> None:
    made = receiver.MessageReceiver(max_receiving=4)
    made.turns.held.update(slow=1, crowd=3)
    waiting = [asyncio.create_task(made.turns.take("crowd")) for _ in range(5)]
    made.turns.num_free = 0
    await asyncio.sleep(0)
    assert made._num_waiting_for("slow") == 0 and made._num_waiting_for("crowd") > 0
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_working_calls_never_give_up_their_place() -> None:
    places = Places("orders", 1)
    places.take("a", AT_WORK)
    with pytest.raises(QueueFull):
        places.take("b", AT_WORK)


@pytest.mark.skipif(HeldMemory(None)._count() == 0, reason="this C library does not tell what it gave out")
def test_memory_allocated_by_the_c_library_is_counted() -> None:
    memory = HeldMemory()
    # The count is never below 0, so what other tests left and is freed meanwhile would hide a part of the block.
    others = bytearray(2**24)
    before = memory.num_bytes()
    block = bytearray(2**26)
    assert memory.num_bytes() - before >= 2**26 - 2**20
    del block
    assert memory.num_bytes() - before < 2**25 and others


def test_a_busy_stream_ended_for_memory_is_not_reported_as_idle() -> None:
    places = Places("things", 2)
    (busy,) = filled(places, "a", None)
    assert not places.shed()
    assert places.shed(busy=True)
    assert isinstance(busy.error, IdleStreamEvicted)
    assert "memory" in busy.error.message
    assert "idle" not in busy.error.message
