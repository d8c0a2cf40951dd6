"""Large descriptor sets travel once per channel, wherever its calls go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from photon_grpc.client import Client, SyncClient
from photon_grpc.client.descriptor_sets import MAX_DIGESTS, MIN_BYTES, REPEATS, DescriptorSets
from photon_grpc.client.message_type import describe, find_message_type
from photon_grpc.client.newer_fields import NewerFields
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.generation import Timing, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import DeadlinePassed, DescriptorSetUnknown, Draining, ScopeRequired
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish, Update
from photon_grpc.server.server import Server
from photon_grpc.server.typed.message_type import MessageTypes
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from tests.server.fake_frontend import FakeFrontend, until

from .fake_server import FakeServer, Refusal, error_info, message, serving, serving_in_a_thread, typed

JSON = b'{"number":"17"}'
LAST = Update(
    (OutputDelta(0, JSON.decode(), (5,), finish=OutputFinish(FinishReason.EOS, eos_token_id=2, message_json=JSON)),),
    Usage(3, 1, 3),
    Timing(0.25, 0.5, 1.5, 2),
)


def message_class(name: str, num_bytes: int) -> type[Message]:
    """Return a class whose set has at least so many bytes."""
    described = FileDescriptorProto(name=f"acme/{name}.proto", package="acme", syntax="proto3")
    fields = described.message_type.add(name=name).field
    fields.add(
        name="number", json_name="number", number=1, type=FieldDescriptorProto.TYPE_STRING, label="LABEL_OPTIONAL"
    )
    described.message_type.add(name="Long" + "g" * num_bytes)
    return find_message_type(FileDescriptorSet(file=[described]).SerializeToString(), f"acme.{name}")


INVOICE = message_class("Invoice", 2 * MIN_BYTES)
NOTE = message_class("Note", MIN_BYTES // 4)


class Replica:
    """A real server with a scripted front end, always at the same address."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:0"
        self._server: Server | None = None

    async def start(self) -> None:
        frontend = FakeFrontend()
        frontend.script = [LAST]
        features = (*frontend.served[0].features, "UNKNOWN_FIELDS_REFUSED")
        frontend.served = (replace(frontend.served[0], features=tuple(dict.fromkeys(features))),)
        self._server = Server(frontend, config=ServerConfig())  # type: ignore[arg-type]
        (self.address,) = await self._server.start((self.address,), reuse_port=False)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.drain_and_stop(0)

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The typed requests of all servers: "set" or "digest"."""
    kinds: list[str] = []
    wanted = MessageTypes.wanted

    def recorded(types: MessageTypes, request: pb.StructuredOutput.Protobuf, origin: Any) -> Any:
        assert bool(request.file_descriptor_set) != bool(request.file_descriptor_set_sha256)
        kinds.append("set" if request.file_descriptor_set else "digest")
        return wanted(types, request, origin)

    monkeypatch.setattr(MessageTypes, "wanted", recorded)
    return kinds


@asynccontextmanager
async def replicas(count: int) -> AsyncIterator[list[Replica]]:
    running = [Replica() for _ in range(count)]
    try:
        for replica in running:
            await replica.start()
        yield running
    finally:
        for replica in running:
            await replica.stop()


def target_of(running: list[Replica]) -> str:
    return "ipv4:" + ",".join(replica.address for replica in running)


async def generate(client: Any) -> Any:
    return (await client.generate("x", message_type=INVOICE)).message


async def stream(client: Any) -> Any:
    return [delta async for delta in client.stream("x", message_type=INVOICE)][-1].message


async def ask(client: Client, count: int, call: Callable[[Any], Any] = generate) -> None:
    for _ in range(count):
        assert await call(client) == INVOICE(number="17")  # type: ignore[call-arg]


async def until_it_may_name_sets(client: Client) -> None:
    await until(lambda: client._newer_fields.is_refusing is True)


@pytest.mark.parametrize("call", [generate, stream])
async def test_replicas_in_turn_get_the_set_and_then_its_digest(arrived: list[str], call: Any) -> None:
    async with replicas(2) as running, Client(target_of(running), retries=0, resume=False) as client:
        await ask(client, 1, call)
        await until_it_may_name_sets(client)
        await until_unknown(client, arrived, call)
        await ask(client, REPEATS, call)
        arrived.clear()
        await ask(client, 10, call)
        assert arrived == ["digest"] * 10

        await running[1].restart()
        await until_unknown(client, arrived, call)
        await ask(client, REPEATS, call)
        arrived.clear()
        await ask(client, 10, call)
        assert arrived == ["digest"] * 10  # each replica has the set


async def until_unknown(client: Client, arrived: list[str], call: Any) -> None:
    """Ask until a replica that was restarted is connected and does not know the digest."""
    arrived.clear()
    async with asyncio.timeout(30):
        while "set" not in arrived:
            await ask(client, 1, call)
            await asyncio.sleep(0.005)
    assert arrived[-2:] == ["digest", "set"]


async def until_ready(replica: Replica) -> None:
    async with Client(replica.address) as client:
        await client.wait_until_ready()


async def test_a_shared_stream_sends_the_set_again_on_a_server_that_restarted(arrived: list[str]) -> None:
    async with replicas(1) as running, Client(target_of(running)) as client:
        for call in (generate, stream):
            arrived.clear()
            async with client.multiplex() as many:
                await ask(many, 1, call)
                await until_it_may_name_sets(client)
                await ask(many, 2, call)
                assert arrived[-2:] == ["digest", "digest"]
                await running[0].restart()
                await until_ready(running[0])
                await ask(many, 1, call)
                assert arrived[-2:] == ["digest", "set"]
                await ask(many, REPEATS + 1, call)
                assert arrived[-1:] == ["digest"]


async def test_small_sets_always_travel(arrived: list[str]) -> None:
    assert len(describe(NOTE).files) < MIN_BYTES
    async with replicas(1) as running, Client(target_of(running)) as client:
        for _ in range(3):
            assert (await client.generate("x", message_type=NOTE)).message == NOTE(number="17")  # type: ignore[call-arg]
        assert arrived == ["set"] * 3 and client._newer_fields.is_refusing is None


async def test_a_closed_channel_is_forgotten(arrived: list[str]) -> None:
    async with replicas(1) as running, Client(target_of(running)) as client:
        await ask(client, 1)
        await until_it_may_name_sets(client)
        await client.close()
        await ask(client, 1)
        assert arrived == ["set", "set"]


def refused(code: grpc.StatusCode, reason: str, field: str = "") -> list[Any]:
    details: list[Any] = [error_info(reason)]
    if field:
        details.append(error_details_pb2.BadRequest(field_violations=[{"field": field}]))
    return [Refusal(code, details=details)]


def whole() -> list[Any]:
    last = message(JSON.decode(), start=True, finish=pb.FINISH_REASON_EOS)
    last.deltas[0].message.CopyFrom(typed(INVOICE(number="17")))  # type: ignore[call-arg]
    return [last]


UNKNOWN = refused(grpc.StatusCode.FAILED_PRECONDITION, "DESCRIPTOR_SET_UNKNOWN")
OLDER = refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "structured_output.protobuf.file_descriptor_set")


def sent(fake: FakeServer) -> list[str]:
    sets = [request.structured_output.protobuf.file_descriptor_set for request in fake.requests]
    return ["set" if files else "digest" for files in sets]


def refusing(*script: list[Any]) -> FakeServer:
    fake = FakeServer(*script)
    fake.features.append(model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED)
    return fake


@pytest.mark.parametrize("call", [generate, stream])
async def test_a_set_that_stays_unknown_is_not_sent_a_third_time(call: Any) -> None:
    async with serving(refusing(whole(), UNKNOWN)) as fake, Client(fake.target) as client:
        await ask(client, 1, call)
        await until_it_may_name_sets(client)
        with pytest.raises(DescriptorSetUnknown):
            await call(client)
        assert sent(fake) == ["set", "digest", "set"]
        with pytest.raises(DescriptorSetUnknown):
            await call(client)
        assert sent(fake) == ["set", "digest", "set", "set"]


@pytest.mark.parametrize("call", [generate, stream])
async def test_a_replica_that_is_older_than_digests_gets_the_set(call: Any) -> None:
    """It ignores the digest and reports that the set is missing."""
    async with serving(refusing(whole(), OLDER, whole())) as fake, Client(fake.target) as client:
        await ask(client, 1, call)
        await until_it_may_name_sets(client)
        await ask(client, 1, call)
        assert sent(fake) == ["set", "digest", "set"]


async def test_servers_that_ignore_unknown_fields_always_get_the_set() -> None:
    async with serving(FakeServer(whole())) as fake, Client(fake.target) as client:
        await ask(client, 1)
        await until(lambda: client._newer_fields.is_refusing is False)
        await ask(client, 3)
        assert sent(fake) == ["set"] * 4


@pytest.mark.parametrize(
    ("failure", "may_name"),
    [(ScopeRequired("no"), True), (Draining(), False), (DeadlinePassed("late"), False), (ValueError("odd"), False)],
)
async def test_a_key_that_may_only_generate_names_sets(failure: Exception, may_name: bool) -> None:
    num_asked = 0

    async def refuse() -> model_pb2.GetModelResponse:
        nonlocal num_asked
        num_asked += 1
        raise failure

    sets = DescriptorSets(NewerFields(refuse, "there"))
    sets.accepted(b"digest")
    assert not sets.may_name(b"digest")
    assert sets._asking is not None
    await sets._asking
    assert sets.may_name(b"digest") is may_name
    # Any other failure leaves the question open.
    sets.accepted(b"digest")
    await until(lambda: num_asked == 1 + (not may_name) and sets._asking is None)


class Asked(FakeServer):
    """A server that notes the models whose features are read."""

    def __init__(self, *script: Any) -> None:
        super().__init__(*script)
        self.asked: list[str] = []
        self.features.append(model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED)

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        self.asked.append(request.model)
        return await super().GetModel(request, context)


async def test_one_answer_holds_for_tools_digests_and_all_models() -> None:
    async with serving(Asked(whole())) as fake, Client(fake.target) as client:
        await ask(client, 1)
        await until_it_may_name_sets(client)
        await client.generate([{"role": "user", "content": "hi"}], tools=[{"name": "f"}], message_type=INVOICE)
        await client.generate("hi", model="demo", message_type=INVOICE)
        assert (sent(fake), fake.asked) == (["set", "digest", "digest"], [""])


async def knowing() -> DescriptorSets:
    """Return the sets of a channel whose servers know digests."""

    async def answer() -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model={"features": [model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED]})

    newer_fields = NewerFields(answer, "there")
    await newer_fields.ask()
    return DescriptorSets(newer_fields)


async def test_only_the_latest_digests_are_kept() -> None:
    sets = await knowing()
    for number in range(MAX_DIGESTS + 1):
        sets.accepted(str(number).encode())
    assert [sets.may_name(each) for each in (b"0", b"1", str(MAX_DIGESTS).encode())] == [False, True, True]
    sets.unknown(b"new")
    assert not sets.may_name(b"1") and len(sets._num_owed) == MAX_DIGESTS


class Scripted:
    """A call that yields messages and failures."""

    def __init__(self, *script: Any) -> None:
        self._script = [*script]

    async def read(self) -> Any:
        step = self._script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def cancel(self) -> None:
        """Do nothing: the call has ended."""


def typed_call(sets: DescriptorSets, *calls: Scripted) -> tuple[Any, list[pb.GenerateRequest]]:
    """Return a stream with a large set, and the requests that it has sent."""
    requests: list[pb.GenerateRequest] = []

    def open_call(request: pb.GenerateRequest, timeout_s: float) -> Scripted:
        requests.append(request)
        return calls[len(requests) - 1]

    request = pb.GenerateRequest(text="x")
    return sets.detach(request, INVOICE).opener(open_call)(request, 30.0), requests


async def test_a_stream_that_is_left_does_not_send_the_set_after_an_unknown_digest() -> None:
    sets = await knowing()
    sets.accepted(describe(INVOICE).digest)
    call, requests = typed_call(sets, Scripted(DescriptorSetUnknown("no")), Scripted(grpc.aio.EOF))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    assert len(requests) == 1 and not sets.may_name(describe(INVOICE).digest)


async def test_a_set_is_accepted_once_by_output(monkeypatch: pytest.MonkeyPatch) -> None:
    sets, accepted = await knowing(), []
    monkeypatch.setattr(sets, "accepted", accepted.append)
    heartbeat = pb.StreamGenerateResponse(sequence=1)
    call, _ = typed_call(sets, Scripted(heartbeat, message("a", start=True), message("b"), heartbeat, grpc.aio.EOF))
    seen = []
    for _ in range(5):
        await call.read()
        seen.append(len(accepted))
    assert seen == [0, 1, 1, 1, 1]


def test_threads_name_sets_too() -> None:
    with serving_in_a_thread(whole()) as fake:
        fake.features.append(model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED)
        with SyncClient(fake.target) as client:
            while "digest" not in sent(fake):
                assert client.generate_message("x", INVOICE) == INVOICE(number="17")  # type: ignore[call-arg]
                assert len(fake.requests) < 1000
