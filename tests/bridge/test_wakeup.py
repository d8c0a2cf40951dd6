"""Events of other threads reach a loop that waits."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.bridge.host import BridgeHost
from photon_grpc.bridge.local import LocalClient, LocalHost
from photon_grpc.bridge.wakeup import Wakeup
from photon_grpc.core.frames import Add, StepFrame
from photon_grpc.core.ports import EnginePorts, Event
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.engine.engine import Engine
from tests.engine.fakes import complete
from tests.engine.harness import Harness
from tests.engine.tables import InTurn, Table, TableMatcher


async def local_host() -> tuple[LocalHost, object]:
    client = LocalClient(asyncio.get_running_loop(), Harness().facts)
    return client.host(), client


async def bridge_host() -> tuple[BridgeHost, object]:
    host = BridgeHost(None, max_frame_bytes=1 << 16)
    theirs, ours = socket.socketpair()
    host.connect(ours)
    return host, theirs


@pytest.mark.parametrize("open_host", [local_host, bridge_host])
async def test_an_event_wakes_a_drain_that_waits(open_host: Callable) -> None:
    host, _other_end = await open_host()
    event, asleep = Event(), threading.Event()

    def sleep() -> list:
        asleep.set()
        # A host may come back with nothing, to show that it is alive.
        while not (frames := host.drain(None)):
            pass
        return frames

    sleeper = asyncio.create_task(asyncio.to_thread(sleep))
    await asyncio.to_thread(asleep.wait)
    await asyncio.sleep(0.01)
    host.wake(event)
    assert await asyncio.wait_for(sleeper, 120) == [(-1, event)]
    host.wake(event)
    assert host.drain(None) == [(-1, event)], "an event that came before the drain"
    host.close()
    host.wake(event)


def test_no_event_of_many_threads_is_lost_or_repeated() -> None:
    wakeup = Wakeup()
    # More than the socket holds bytes, so that some find it full.
    events = [[Event() for _ in range(2000)] for _ in range(4)]
    threads = [threading.Thread(target=lambda each=each: [wakeup.ring(event) for event in each]) for each in events]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = []
    while more := wakeup.take():
        taken += more
    assert len(taken) == 8000 and set(taken) == {event for each in events for event in each}
    wakeup.close()


class ThreadGrammars(InTurn):
    """Compiles in a thread of its own, which waits until it is let."""

    def __init__(self, table: Table, wake: Callable[[Event], None]) -> None:
        self._table = table
        self._wake = wake
        self._is_ready = False
        self.is_asked = threading.Event()
        self.may_compile = threading.Event()

    def prepare(self, request: Request, ids: tuple[int, ...], is_anew: bool) -> ThreadGrammars:
        return self

    def awaits(self) -> Event | None:
        if self._is_ready:
            return None
        event = Event()
        threading.Thread(target=self._compile, args=(event,)).start()
        self.is_asked.set()
        return event

    def matchers(self, num: int) -> list[TableMatcher]:
        return [TableMatcher(self._table) for _ in range(num)]

    def cancel(self) -> None:
        pass

    def _compile(self, event: Event) -> None:
        self.may_compile.wait()
        self._is_ready = True
        self._wake(event)


async def test_a_grammar_compiled_in_a_thread_wakes_the_engine_that_sleeps() -> None:
    h = Harness()
    client = LocalClient(asyncio.get_running_loop(), h.facts)
    host = client.host()
    table = Table(({1: 1}, {2: 0}), frozenset())
    h.scheduler.live.constraints._grammars = grammars = ThreadGrammars(table, host.wake)
    ids: list[int] = []
    over = asyncio.Event()

    def received(frame: object) -> None:
        if isinstance(frame, StepFrame):
            ids.extend(frame.ids)
            if frame.finished:
                over.set()

    client.listen(received, over.set)
    engine = Engine(h.scheduler, h.runner, EnginePorts(host, host, NoHeartbeat()), h.facts)
    running = asyncio.create_task(asyncio.to_thread(engine.run))
    client.send(Add(0, Request("a", (1, 2), SamplingParams(seed=4), StopParams(9), 0.0)))
    await asyncio.to_thread(grammars.is_asked.wait)
    await asyncio.sleep(0.01)
    assert not ids and not h.scheduler.live.has_work() and h.scheduler.live.num_queued == 1
    grammars.may_compile.set()
    await asyncio.wait_for(over.wait(), 120)
    host.close()
    await running
    assert ids == complete([1, 2], 9, seed=4, table=table)
