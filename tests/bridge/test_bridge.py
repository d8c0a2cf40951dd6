"""Host and client over real sockets, in one program: what the engine sees, what a front end sees."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from photon_grpc.bridge.client import BridgeClient
from photon_grpc.bridge.codec import DOWN, UP, FrameReader, encode, max_frame_bytes
from photon_grpc.bridge.control import ControlChannel, Link, RequestsLost, Stop
from photon_grpc.bridge.host import BridgeHost
from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.frames import Abort, Add, Facts, Failed, Finished, StepFrame, Watch
from photon_grpc.core.request import FinishReason, Request, SamplingParams, StopParams
from photon_grpc.core.stats import Load
from photon_grpc.errors import EngineRestarting, ModelLoading, QueueFull
from tests.kv_plans import kv_plan

MAX_BYTES = max_frame_bytes(1 << 20)
FACTS = Facts(4096, 4096, kv_plan(16), 100, 64, 2048, 1024, 1 << 20, "cpu", "float32")


def add(handle: int, num_outputs: int = 1, num_ids: int = 3) -> Add:
    return Add(
        handle, Request("", tuple(range(num_ids)), SamplingParams(), StopParams(8), 0.0, num_outputs=num_outputs)
    )


def step(handles: tuple[int, ...] = (), finished: tuple[int, ...] = (), failed: tuple[int, ...] = ()) -> StepFrame:
    ends = tuple(Finished(handle, FinishReason.EOS, 1, 0, 0.0) for handle in finished)
    return StepFrame(1, handles, handles, ends, tuple(Failed.of(handle, QueueFull("")) for handle in failed), Load())


def picture(number: int) -> EnginePicture:
    return EnginePicture(float(number), (), 0, (), Load())


@pytest.fixture
def supervisor():
    ours, theirs = socket.socketpair()
    channel = ControlChannel(ours)
    channel.child = ControlChannel(theirs)
    yield channel
    channel.close()


@pytest.fixture
def host(supervisor):
    host = BridgeHost(supervisor.child, max_frame_bytes=MAX_BYTES, max_backlog_bytes=1 << 20)
    yield host
    host.close()


@pytest.fixture
def frontend(host):
    """Yield the number and the socket of a raw front end."""
    ours, theirs = socket.socketpair()
    with ours:
        yield host.connect(theirs), ours


def received(sock: socket.socket, count: int) -> list:
    reader, frames = FrameReader(UP, max_bytes=MAX_BYTES), []
    while len(frames) < count:
        data = sock.recv(1 << 16)
        assert data
        frames += reader.feed(data)
    return frames


def test_frames_come_with_the_number_of_their_front_end(host, frontend):
    number, sock = frontend
    ours, theirs = socket.socketpair()
    other = host.connect(theirs)
    sock.sendall(encode(add(1)) + encode(Abort((1,))))
    ours.sendall(encode(add(1)))
    got = host.drain(None)
    got += host.drain(0.0)
    assert sorted(got, key=lambda pair: pair[0]) == [(number, add(1)), (number, Abort((1,))), (other, add(1))]
    ours.close()


def test_drain_does_not_wait_when_it_must_not(host, frontend):
    assert host.drain(0.0) == []
    assert host.drain(0.01) == []


def test_facts_come_first_for_present_and_later_front_ends(host, frontend):
    host.announce(FACTS)
    host.send(frontend[0], step((1,)))
    ours, theirs = socket.socketpair()
    host.connect(theirs)
    assert received(frontend[1], 2) == [FACTS, step((1,))]
    assert received(ours, 1) == [FACTS]
    ours.close()


def test_the_load_reaches_every_front_end_after_the_facts(host, frontend):
    ours, theirs = socket.socketpair()
    host.connect(theirs)
    host.announce(FACTS)
    host.broadcast(Load(running=1))
    host.broadcast(Load(running=2))
    for sock in (frontend[1], ours):
        assert received(sock, 3) == [FACTS, Load(running=1), Load(running=2)]
    later, theirs = socket.socketpair()
    host.connect(theirs)
    assert received(later, 2) == [FACTS, Load(running=2)]
    ours.close()
    later.close()


def test_a_front_end_that_goes_leaves_an_abort_of_what_still_lives(host, frontend):
    number, sock = frontend
    sock.sendall(b"".join(encode(frame) for frame in (add(1), add(2, num_outputs=4), add(6), add(7), Abort((6,)))))
    assert len(host.drain(None)) == 5
    host.send(number, step((1, 2), finished=(1, 3), failed=(7,)))
    sock.close()
    assert host.drain(None) == [(number, Abort((2, 4, 5)))]
    host.send(number, step((2,)))
    assert host.drain(0.0) == []


def test_aborts_of_a_front_end_that_left_are_still_read(host, frontend, caplog):
    """Though what it was written to in between found nobody."""
    number, sock = frontend
    sock.sendall(encode(add(7)))
    assert host.drain(5.0) == [(number, add(7))]
    sock.sendall(encode(Abort((7,))))
    sock.close()
    host.send(number, step((7,)))
    host.send(number, step((7,)))
    assert host.drain(5.0) == [(number, Abort((7,)))]
    host.drain(0.0)
    host.send(number, step())
    assert caplog.messages == []


def test_an_engine_that_ends_hangs_up_though_its_socket_stays_open(host, frontend):
    _, sock = frontend
    sock.settimeout(60)
    host.hang_up()
    assert sock.recv(1) == b""


def test_garbage_ends_only_the_connection_that_sent_it(host, frontend):
    number, sock = frontend
    ours, theirs = socket.socketpair()
    other = host.connect(theirs)
    sock.sendall(encode(add(1)))
    assert host.drain(None) == [(number, add(1))]
    sock.sendall(b"\xff" * 64)
    assert host.drain(None) == [(number, Abort((1,)))]
    assert sock.recv(1) == b""
    ours.sendall(encode(add(1)))
    assert host.drain(None) == [(other, add(1))]
    ours.close()


def test_a_slow_reader_gets_everything_eventually(host, frontend):
    number, sock = frontend
    frames = [step(tuple(range(n, n + 2000))) for n in range(60)]
    for frame in frames:
        host.send(number, frame)
    got = []
    reader = threading.Thread(target=lambda: got.extend(received(sock, len(frames))))
    reader.start()
    while reader.is_alive():
        assert host.drain(0.01) == []
    assert got == frames


def test_a_front_end_that_does_not_read_is_dropped_and_others_are_not(host, frontend):
    number, sock = frontend
    sock.sendall(encode(add(1)))
    host.drain(None)
    big = step(tuple(range(50_000)))
    for _ in range(40):
        host.send(number, big)
    assert host.drain(None) == [(number, Abort((1,)))]


def test_a_front_end_that_reads_nothing_for_too_long_is_dropped(supervisor):
    host = BridgeHost(supervisor.child, max_frame_bytes=MAX_BYTES, max_stall_s=0.0)
    ours, theirs = socket.socketpair()
    number = host.connect(theirs)
    ours.sendall(encode(add(1)))
    host.drain(None)
    for _ in range(20):
        host.send(number, step(tuple(range(20_000))))
    assert host.drain(None) == [(number, Abort((1,)))]
    host.close()
    ours.close()


def test_pictures_come_to_the_front_end_that_watches(host, frontend):
    number, sock = frontend
    sock.sendall(encode(Watch(is_on=True)))
    assert host.drain(None) == [(number, Watch(is_on=True))]
    host.send(number, picture(1))
    host.send(number, step((1,)))
    assert received(sock, 2) == [picture(1), step((1,))]


def test_pictures_do_not_wait_for_a_front_end_that_reads_slowly(host, frontend):
    """Those that come while it reads nothing are dropped; everything else arrives."""
    number, sock = frontend
    steps = [step(tuple(range(n, n + 2000))) for n in range(60)]
    host.send(number, picture(0))
    for frame in steps:
        host.send(number, frame)
        host.send(number, picture(1))
    size = host._connections[number].backlog_bytes
    for _ in range(1000):
        host.send(number, picture(2))
    assert host._connections[number].backlog_bytes == size > 0
    got = []

    def read() -> None:
        reader = FrameReader(UP, max_bytes=MAX_BYTES)
        while picture(3) not in got:
            got.extend(reader.feed(sock.recv(1 << 16)))

    reader = threading.Thread(target=read)
    reader.start()
    while host._connections[number].backlog:
        host.drain(0.01)
    host.send(number, picture(3))
    reader.join()
    assert [frame for frame in got if isinstance(frame, StepFrame)] == steps
    assert picture(2) not in got and got.count(picture(1)) < len(steps)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_front_end_that_goes_watches_no_longer(host, frontend, is_on):
    number, sock = frontend
    sock.sendall(encode(Watch(is_on=True)) + encode(Watch(is_on)) + encode(add(1)))
    assert len(host.drain(None)) == 3
    sock.close()
    assert host.drain(None) == [(number, Abort((1,))), *([(number, Watch(is_on=False))] if is_on else [])]
    host.send(number, picture(1))


def test_the_supervisor_is_told_which_requests_a_front_end_took_with_it(host, supervisor, frontend):
    number, sock = frontend
    sock.sendall(b"".join(encode(frame) for frame in (add(1), add(2, num_outputs=4), add(6))))
    host.drain(None)
    # Unread: the engine's end is reset, not only closed.
    host.send(number, step((1,), finished=(1,)))
    sock.close()
    assert host.drain(None) == [(number, Abort((2, 3, 4, 5, 6)))]
    host.send(number, step((2, 3)))
    assert supervisor.receive() == [RequestsLost(2)]


def test_requests_of_a_front_end_dropped_alive_are_not_reported_as_lost(host, supervisor, frontend):
    _, sock = frontend
    sock.sendall(encode(add(1)))
    host.drain(None)
    sock.sendall(b"\xff" * 64)
    assert [frame for _, frame in host.drain(None)] == [Abort((1,))]
    supervisor.child.send(RequestsLost(7))  # all that was said stands before it
    assert supervisor.receive() == [RequestsLost(7)]


def test_the_supervisor_brings_front_ends_and_says_stop(host, supervisor):
    ours, theirs = socket.socketpair()
    supervisor.send(Link(), theirs)
    theirs.close()
    ours.sendall(encode(add(1)))
    assert host.drain(None) == []
    assert host.drain(None) == [(0, add(1))]
    supervisor.send(Stop())
    with pytest.raises(EOFError):
        host.drain(None)
    ours.close()


def test_it_ends_only_when_every_peer_is_gone(host, supervisor, frontend):
    number, sock = frontend
    supervisor.close()
    assert host.drain(None) == []
    sock.sendall(encode(add(1)))
    assert host.drain(None) == [(number, add(1))]
    sock.close()
    assert host.drain(None) == [(number, Abort((1,)))]
    with pytest.raises(EOFError):
        host.drain(None)


class Ear:
    """Hears what a client hears."""

    def __init__(self, client: BridgeClient) -> None:
        self.frames: asyncio.Queue = asyncio.Queue()
        self.lost = asyncio.Event()
        client.listen(self.frames.put_nowait, self.lost.set)


def on_both_loops(test):
    """Run the coroutine on the loops of asyncio and uvloop."""

    @pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
    def run(loop: str) -> None:
        factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test())

    return run


@on_both_loops
async def test_a_client_speaks_with_its_engine():
    client = BridgeClient(max_frame_bytes=MAX_BYTES)
    ear = Ear(client)
    with pytest.raises(ModelLoading):
        client.send(add(1))
    ours, theirs = socket.socketpair()
    await client.connect(theirs)
    with pytest.raises(ModelLoading):
        client.send(add(1))
    ours.sendall(encode(FACTS) + encode(step((1,))))
    assert await ear.frames.get() == FACTS
    assert client.facts == FACTS
    assert await ear.frames.get() == step((1,))
    sent = [add(1), add(2, num_ids=100_000), Abort((1,))]
    for frame in sent:
        client.send(frame)
    reader, got = FrameReader(DOWN, max_bytes=MAX_BYTES), []
    while len(got) < len(sent):
        got += reader.feed(await asyncio.to_thread(ours.recv, 1 << 16))
    assert got == sent
    client.close()
    ours.close()


@on_both_loops
async def test_the_backlog_for_an_engine_that_does_not_read_is_bounded_and_aborts_still_go():
    limit = 300_000
    client = BridgeClient(max_frame_bytes=MAX_BYTES, max_backlog_bytes=limit)
    ear = Ear(client)
    ours, theirs = socket.socketpair()
    await client.connect(theirs)
    ours.sendall(encode(FACTS))
    await ear.frames.get()
    frame_bytes = len(encode(add(1, num_ids=5000)))
    num_sent, refusals = 0, []
    for turn in range(20):
        for _ in range(20):  # in one turn of the loop
            try:
                client.send(add(1000 * turn + num_sent, num_ids=5000))
                num_sent += 1
            except QueueFull as error:
                refusals.append(error)
        await asyncio.sleep(0)
    assert refusals and all(error.limit == limit < error.needed <= limit + frame_bytes for error in refusals)
    assert all(error.retry_after_s for error in refusals)
    client.send(Abort((1,)))
    reader, got = FrameReader(DOWN, max_bytes=MAX_BYTES), []
    while len(got) < num_sent + 1:
        got += reader.feed(await asyncio.to_thread(ours.recv, 1 << 16))
    assert got[-1] == Abort((1,))
    client.send(add(10**6))
    assert await asyncio.to_thread(ours.recv, 1 << 16) == encode(add(10**6)), "what was read makes room"
    client.close()
    ours.close()


@on_both_loops
async def test_a_lost_engine_is_reported_at_once_and_the_next_replaces_it():
    client = BridgeClient(max_frame_bytes=MAX_BYTES)
    ear = Ear(client)
    first, theirs = socket.socketpair()
    await client.connect(theirs)
    first.sendall(encode(FACTS))
    await ear.frames.get()
    first.close()
    await asyncio.wait_for(ear.lost.wait(), 120)
    assert client.facts is None
    with pytest.raises(EngineRestarting):
        client.send(add(1))
    second, theirs = socket.socketpair()
    await client.connect(theirs)
    second.sendall(encode(FACTS))
    assert await ear.frames.get() == FACTS
    client.send(add(2))
    assert await asyncio.to_thread(second.recv, 1 << 16) == encode(add(2))
    client.close()
    second.close()


@on_both_loops
async def test_a_new_engine_before_the_old_one_is_missed():
    client = BridgeClient(max_frame_bytes=MAX_BYTES)
    ear = Ear(client)
    first, theirs = socket.socketpair()
    await client.connect(theirs)
    first.sendall(encode(FACTS))
    await ear.frames.get()
    second, theirs = socket.socketpair()
    await client.connect(theirs)
    assert ear.lost.is_set()
    assert client.facts is None
    assert await asyncio.to_thread(first.recv, 1) == b""
    first.close()
    client.close()
    second.close()


@on_both_loops
async def test_an_engine_that_dies_while_loading_is_no_loss():
    client = BridgeClient(max_frame_bytes=MAX_BYTES)
    ear = Ear(client)
    ours, theirs = socket.socketpair()
    await client.connect(theirs)
    ours.close()
    await asyncio.sleep(0.05)
    assert not ear.lost.is_set()
    with pytest.raises(ModelLoading):
        client.send(add(1))


@on_both_loops
async def test_garbage_from_the_engine_is_a_loss():
    client = BridgeClient(max_frame_bytes=MAX_BYTES)
    ear = Ear(client)
    ours, theirs = socket.socketpair()
    await client.connect(theirs)
    ours.sendall(encode(FACTS))
    await ear.frames.get()
    ours.sendall(b"\x01\x00\x00\x00\xc1")
    await asyncio.wait_for(ear.lost.wait(), 120)
    assert client.facts is None
    ours.close()
